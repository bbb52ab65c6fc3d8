-- Tickets, grants and placing: what arm, renew, finish_pool and cancel_pool share.
-- The twin of `core/dispatch.py`, function by function.
--
-- KEYS    all of a pool's (see pool_state.lua)
-- RULES   every field of `core.dispatch.PoolRules`
-- ARGV    none: the script hands over what it takes from them
-- RETURNS nothing: it defines local functions for the script that follows

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

local function release_ticket(ticket)
  local replica = replica_of(ticket)
  if replica then
    release(replica, ticket.ticket, ticket.placed.placement, ticket.kv_blocks)
  end
  ticket.number = 0
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

-- As told to a gateway: {"placed", …} or {"dropped", reason}.
local function outcome_of(ticket)
  if ticket.state == 'dropped' then return {'dropped', ticket.reason} end
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
    state = 'queued', number = 0, input_tokens = 0, output_tokens = 0, cost = 0,
  }
  own(ticket)
  change_ticket(ticket)
  return ticket
end

-- Why no wait will help: "no_replica", "fits_never" or nil.
local function hopeless(blocks)
  local most
  for _, replica in pairs(all_replicas()) do most = math.max(most or 0, replica.total) end
  if not most then
    local empty_ms = pool.now_ms - pool.empty_since_ms
    return empty_ms >= RULES.no_replica_ms and 'no_replica' or nil
  end
  return blocks > most and 'fits_never' or nil
end

-- The service rate.

local function roll_window()
  local elapsed = math.floor((pool.now_ms - pool.window_start_ms) / RULES.window_ms)
  if elapsed > 0 then
    pool.window_before = elapsed == 1 and pool.window_count or 0
    pool.window_count = 0
    pool.window_start_ms = pool.window_start_ms + elapsed * RULES.window_ms
  end
end

local function expected_wait_ms(position)
  roll_window()
  local left_ms = RULES.window_ms - (pool.now_ms - pool.window_start_ms)
  local served = pool.window_count + math.floor(pool.window_before * left_ms / RULES.window_ms)
  if served == 0 then return 0 end
  return math.min(RULES.wait_max_ms, math.floor(position * RULES.window_ms / served))
end

-- Placing.

-- Whether tickets may be placed: not before a new epoch knows what is running.
local function is_open()
  local age_ms = pool.now_ms - pool.started_ms
  if pool.epoch == '' or age_ms < RULES.reannounce_ms then return false end
  return next(pool.owing) == nil or age_ms >= RULES.reannounce_max_ms
end

local function place(ticket, replica, state)
  local hashes = ticket.prefix_hashes
  local matched = prefix_matched(hashes)[replica.number] or 0
  local placement = math.max(replica.placed + 1, pool.now_ms)
  hold(replica, ticket.ticket, placement, ticket.kv_blocks)
  ticket.state, ticket.number = state, replica.number
  ticket.placed = {
    replica = replica.replica, boot_id = replica.boot_id, url = replica.url,
    placement = placement, prefix_matched = matched,
  }
  local cached = #hashes > 0 and math.floor(ticket.prompt_tokens * matched / #hashes) or 0
  charge_ticket(ticket, ticket.prompt_tokens - cached, ticket.output_tokens)
  prefix_record(hashes, replica.number)
  roll_window()
  pool.window_count = pool.window_count + 1
end

local function drop(ticket, reason, own_name)
  remove_ticket(ticket)
  ticket.state, ticket.reason = 'dropped', reason
  change_ticket(ticket)
  if ticket.ticket ~= own_name then tell(ticket) end
end

local function serve(ticket, replica, owed, own_name)
  count_share(RANKS[ticket.service_class], ticket.kv_blocks, owed)
  remove_ticket(ticket)
  local is_own = ticket.ticket == own_name
  place(ticket, replica, is_own and 'placed' or 'granted')
  if not is_own then tell(ticket) end
end

-- Places waiting tickets, next first; `own_name` is the caller's, which hears at once.
-- The first head that fits nowhere keeps one replica for itself while others pass.
local function dispatch(own_name)
  if not is_open() then return end
  local protected, grants, skipped, skipped_count = 0, 0, {}, 0
  for _ = 1, RULES.steps_max do
    local name, owed = head_of_queue(skipped, skipped_count)
    if not name or grants >= RULES.grants_max then return end
    local ticket = find_ticket(name)
    local reason = ticket.deadline_ms <= pool.now_ms and 'expired' or hopeless(ticket.kv_blocks)
    if reason then
      drop(ticket, reason, own_name)
    else
      local able = candidates(ticket.kv_blocks, ticket.exclude)
      local replica = choose(able, ticket.kv_blocks, ticket.prefix_hashes, protected)
      if replica then
        serve(ticket, replica, owed, own_name)
        grants = grants + 1
      else
        if protected == 0 then protected = protect(able) end
        skipped[lane(ticket.service_class, ticket.tenant)] = true
        skipped_count = skipped_count + 1
        if skipped_count > RULES.skips_max then return end
      end
    end
  end
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
