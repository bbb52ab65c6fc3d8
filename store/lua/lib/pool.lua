-- Tickets, grants and placing: what arm, renew, finish_pool and cancel_pool share.
-- The twin of `core/dispatch.py`, function by function.
--
-- KEYS    all of a pool's (see pool_state.lua)
-- RULES   every field of `core.dispatch.PoolRules`
-- ARGV    none: the script hands over what it takes from them
-- RETURNS nothing: it defines local functions for the script that follows

local SMOOTHING = 16 -- requests that a measured time is the average of, roughly
local LEARNING, FORGETTING = 4, 32 -- promises broken count for more than those kept
local STRETCH_ONE, STRETCH_MAX, PROMISE_MS_MIN = 1000, 16000, 50

local function owned_member(ticket) return ticket.gateway .. '|' .. ticket.ticket end

-- Moves the tenant's counter to what this ticket costs, whatever it had cost so far.
local function charge_ticket(ticket, input_tokens, output_tokens)
  ticket.input_tokens, ticket.output_tokens = input_tokens, output_tokens
  local owed = cost_of(input_tokens, output_tokens, ticket.weight)
  charge_counter(ticket.tenant, owed - ticket.cost)
  ticket.cost = owed
  change_ticket(ticket)
end

local function refund_ticket(ticket)
  charge_counter(ticket.tenant, -ticket.cost)
  ticket.cost = 0
  change_ticket(ticket)
end

-- The replica whose account holds the ticket, if that life still goes on.
local function replica_of(ticket)
  if ticket.number == 0 then return nil end
  local replica = find_replica(ticket.placed.replica)
  if replica and replica.number == ticket.number then return replica end
  return nil
end

local function hold_ticket(ticket, replica)
  hold(replica, ticket.ticket, ticket.placed.placement, ticket.kv_blocks, ticket.in_lane)
  ticket.number = replica.number
  redis.call('HINCRBY', K.open, ticket.tenant, 1)
end

local function release_ticket(ticket)
  local replica = replica_of(ticket)
  if replica then
    release(replica, ticket.ticket, ticket.placed.placement, ticket.kv_blocks, ticket.in_lane)
  end
  if ticket.number > 0 and redis.call('HINCRBY', K.open, ticket.tenant, -1) == 0 then
    redis.call('HDEL', K.open, ticket.tenant)
  end
  ticket.number, ticket.in_lane = 0, false
end

-- Grants.

local function tell(ticket)
  pool.granted = pool.granted + redis.call('ZADD', K.granted, 0, owned_member(ticket))
  if ticket.state == 'granted' then
    local due_ms = pool.now_ms + RULES.ack_ms
    pool.unacked = pool.unacked + redis.call('ZADD', K.unacked, due_ms, ticket.ticket)
  end
  woken[ticket.gateway] = true
end

local function untell(ticket)
  if ticket.state == 'granted' or ticket.state == 'dropped' then
    pool.granted = pool.granted - redis.call('ZREM', K.granted, owned_member(ticket))
    pool.unacked = pool.unacked - redis.call('ZREM', K.unacked, ticket.ticket)
  end
end

-- As told to a gateway: {"placed", …} or {"dropped", reason, expected_wait_ms}.
local function outcome_of(ticket)
  if ticket.state == 'dropped' then return {'dropped', ticket.reason, ticket.wait_ms} end
  local placed = ticket.placed
  return {'placed', placed.replica, placed.boot_id, placed.url, placed.placement,
    placed.prefix_matched}
end

local function grants_for(gateway)
  local grants = {}
  if pool.granted == 0 then return grants end
  for _, member in ipairs(beginning(K.granted, gateway, RULES.listed_max)) do
    local name = string.sub(member, #gateway + 2)
    grants[#grants + 1] = {name, outcome_of(find_ticket(name))}
  end
  return grants
end

-- Tickets.

local function disown(ticket) redis.call('ZREM', K.owned, owned_member(ticket)) end

local function own(ticket) redis.call('ZADD', K.owned, 0, owned_member(ticket)) end

-- Leaves the pool from whatever state; the counter stays as it is.
local function forget(ticket)
  if ticket.state == 'queued' then remove_ticket(ticket) end
  release_ticket(ticket)
  untell(ticket)
  disown(ticket)
  delete_ticket(ticket.ticket)
end

local function enqueue(ticket, at_head)
  ticket.state = 'queued'
  push_ticket(ticket, at_head)
  change_ticket(ticket)
end

local function return_to_head(ticket)
  refund_ticket(ticket)
  release_ticket(ticket)
  untell(ticket)
  ticket.placed = nil
  enqueue(ticket, true)
end

local function acknowledge(gateway, name)
  local ticket = find_ticket(name)
  if not ticket or ticket.gateway ~= gateway or ticket.state == 'queued' then return nil end
  local grant = {name, outcome_of(ticket)}
  untell(ticket)
  if ticket.state == 'dropped' then
    forget(ticket)
  elseif ticket.state == 'granted' then
    ticket.state = 'placed'
    change_ticket(ticket)
  end
  return grant
end

local function new_ticket(arm, gateway)
  local ticket = {
    ticket = arm.ticket, gateway = gateway, tenant = arm.tenant, weight = arm.weight,
    service_class = arm.service_class,
    deadline_ms = arm.deadline_ms > 0 and arm.deadline_ms or pool.now_ms + RULES.wait_max_ms,
    kv_blocks = arm.kv_blocks, prompt_tokens = arm.prompt_tokens,
    prefix_hashes = arm.prefix_hashes, exclude = arm.exclude,
    state = 'queued', queued_ms = 0, promised_ms = 0, number = 0, in_lane = false, input_tokens = 0, output_tokens = 0, cost = 0,
  }
  own(ticket)
  change_ticket(ticket)
  return ticket
end

-- How long tickets stay on their replicas, and what that makes of a wait (`core/shed.py`).

local function measure_stay(ticket)
  local us = 1000 * math.max(0, pool.now_ms - ticket.placed.placement)
  if pool.samples == 0 then
    pool.stay_us = us
  else
    pool.stay_us = pool.stay_us + math.floor((us - pool.stay_us) / SMOOTHING)
  end
  pool.samples = pool.samples + 1
end

-- What a ticket needs once it is placed, as far as known.
local function least_stay_ms()
  return pool.samples >= RULES.shed.samples_min and math.floor(pool.stay_us / 1000) or 0
end

local function wait_at(place)
  if pool.open == 0 then return 0 end
  return math.min(RULES.wait_max_ms, math.floor(place * pool.stay_us / (1000 * pool.open)))
end

-- By the place of the tenant's last ticket in this class (`joined` is 1), or of one more that
-- would join.
local function promise_ms(asked, joined)
  return wait_at(place_in(RANKS[asked.service_class], asked.tenant, joined))
end

-- What such a promise is worth in this class.
local function wait_ms(asked, joined)
  local stretch = pool.stretch[RANKS[asked.service_class]]
  return math.min(RULES.wait_max_ms,
    math.floor(promise_ms(asked, joined) * stretch / STRETCH_ONE))
end

local function measure_wait(ticket)
  if ticket.promised_ms >= PROMISE_MS_MIN then
    local rank, waited_ms = RANKS[ticket.service_class], pool.now_ms - ticket.queued_ms
    local ratio = math.min(STRETCH_MAX, math.floor(waited_ms * STRETCH_ONE / ticket.promised_ms))
    local off = ratio - pool.stretch[rank]
    pool.stretch[rank] = pool.stretch[rank] + math.floor(off / (off > 0 and LEARNING or FORGETTING))
  end
  ticket.promised_ms = 0
end

local function congestion_ms() return wait_at(position_in(RANKS.standard)) end

-- Placing.

-- Whether tickets may be placed: not before a new epoch knows what is running.
local function is_open()
  local age_ms = pool.now_ms - pool.started_ms
  if pool.epoch == '' or age_ms < RULES.reannounce_ms then return false end
  return next(pool.owing) == nil or age_ms >= RULES.reannounce_max_ms
end

local function place(ticket, replica, in_lane, state)
  local hashes = ticket.prefix_hashes
  local matched = prefix_matched(hashes)[replica.number] or 0
  local placement = math.max(replica.placed + 1, pool.now_ms)
  ticket.state, ticket.in_lane = state, in_lane
  ticket.placed = {
    replica = replica.replica, boot_id = replica.boot_id, url = replica.url,
    placement = placement, prefix_matched = matched,
  }
  hold_ticket(ticket, replica)
  local cached = #hashes > 0 and math.floor(ticket.prompt_tokens * matched / #hashes) or 0
  charge_ticket(ticket, ticket.prompt_tokens - cached, ticket.output_tokens)
  prefix_record(hashes, replica.number)
end

local function drop(ticket, reason, own_name, expected_ms)
  measure_wait(ticket)
  remove_ticket(ticket)
  ticket.state, ticket.reason, ticket.wait_ms = 'dropped', reason, expected_ms
  change_ticket(ticket)
  if ticket.ticket ~= own_name then tell(ticket) end
end

local function serve(ticket, replica, in_lane, owed, own_name)
  measure_wait(ticket)
  count_share(RANKS[ticket.service_class], ticket.kv_blocks, owed)
  remove_ticket(ticket)
  local is_own = ticket.ticket == own_name
  place(ticket, replica, in_lane, is_own and 'placed' or 'granted')
  if not is_own then tell(ticket) end
end

-- Where it goes now, a replica and whether into its lane; `kept` waits for another ticket.
-- The lane is for tenants that have nothing open, batch aside. What is owed to a class goes
-- anywhere, or a crowd of such tenants could keep it waiting for ever.
local function find_spot(ticket, owed, kept, lane_is_kept)
  local replica = choose(ticket, owed and fits or takes, kept)
  if replica or owed or ticket.service_class == 'batch' then return replica, false end
  if redis.call('HEXISTS', K.open, ticket.tenant) == 1 then return nil, false end
  return choose(ticket, lane_takes, lane_is_kept and kept or 0), true
end

-- Places waiting tickets, next first; `own_name` is the caller's, which hears at once.
-- The first head that fits nowhere keeps one replica for itself while others pass; when it is
-- only the lane that it does not get, the lane stays open.
local function dispatch(own_name)
  if not is_open() then return end
  local kept, lane_is_kept, grants, skipped, skipped_count = 0, false, 0, {}, 0
  for _ = 1, RULES.steps_max do
    local name, owed = head_of_queue(skipped, skipped_count)
    if not name or grants >= RULES.grants_max then return end
    local ticket = find_ticket(name)
    local is_late = ticket.deadline_ms - least_stay_ms() <= pool.now_ms
    local reason = is_late and 'expired' or hopeless(ticket.kv_blocks)
    if reason then
      drop(ticket, reason, own_name, 0)
    else
      local replica, in_lane = find_spot(ticket, owed, kept, lane_is_kept)
      if replica then
        serve(ticket, replica, in_lane, owed, own_name)
        grants = grants + 1
      else
        if skipped_count == 0 then
          kept = protect(ticket)
          lane_is_kept = choose(ticket, fits, 0) == nil
        end
        skipped[lane(ticket.service_class, ticket.tenant)] = true
        skipped_count = skipped_count + 1
        if skipped_count > RULES.skips_max then return end
      end
    end
  end
end

-- Why a ticket that has to wait is sent away, or nil (`core/shed.py`).
local function shed_reason(ticket, expected_ms, deadline_ms)
  local rank = RANKS[ticket.service_class]
  local waiting = pool.counts[rank]
  local is_over_share = waiting_of(rank, ticket.tenant) * tenants_in(rank) > waiting
  if is_over_share and 2 * waiting > RULES.queue.queue_max then return 'over_share' end
  if pool.samples < RULES.shed.samples_min then return nil end
  if ticket.service_class == 'batch' then
    local is_long = congestion_ms() >= RULES.shed.batch_wait_ms
    if is_long and waiting > RULES.shed.batch_kept then return 'batch_refused' end
  elseif is_over_share and congestion_ms() >= RULES.shed.share_wait_ms then
    return 'over_share'
  end
  local done_ms = expected_ms + math.floor(pool.stay_us / 1000)
  done_ms = math.floor(done_ms * RULES.shed.margin_percent / 100)
  return deadline_ms > 0 and pool.now_ms + done_ms > deadline_ms and 'too_late' or nil
end

local function shed(ticket, deadline_ms)
  if ticket.state ~= 'queued' then return end
  local expected_ms = wait_ms(ticket, 1)
  local reason = shed_reason(ticket, expected_ms, deadline_ms)
  if reason then return drop(ticket, reason, ticket.ticket, expected_ms) end
  ticket.queued_ms, ticket.promised_ms = pool.now_ms, promise_ms(ticket, 1)
  change_ticket(ticket)
end

-- What each call does first: lets go of what was waited for in vain.

local function sweep(gateway)
  local members = beginning(K.owned, gateway, RULES.sweep_max + 1)
  for i = 1, math.min(#members, RULES.sweep_max) do
    forget(find_ticket(string.sub(members[i], #gateway + 2)))
  end
  if #members <= RULES.sweep_max then
    redis.call('ZREM', K.gateways, gateway)
    pool.owing[gateway] = nil
  else
    pool.owing[gateway] = true -- one that comes back before the rest are gone
  end
end

local function begin(keys, now_arg)
  open_pool(keys, now_arg)
  if pool.unacked > 0 then
    local due = redis.call('ZRANGE', K.unacked, '-inf', pool.now_ms, 'BYSCORE',
      'LIMIT', 0, RULES.sweep_max)
    for _, name in ipairs(due) do return_to_head(find_ticket(name)) end
  end
  if pool.lease_check_ms <= pool.now_ms then
    local first = redis.call('ZRANGE', K.gateways, 0, 0, 'WITHSCORES')
    pool.lease_check_ms = tonumber(first[2] or 0)
    if first[1] and pool.lease_check_ms <= pool.now_ms then sweep(first[1]) end
  end
end

-- Extends the gateway's lease; false when it had none.
local function heard(gateway)
  if pool.epoch == '' then
    pool.epoch = string.format('%.0f-%s', pool.now_ms, gateway)
    pool.started_ms, pool.empty_since_ms = pool.now_ms, pool.now_ms
  end
  return redis.call('ZADD', K.gateways, pool.now_ms + RULES.lease_ms, gateway) == 0
end
