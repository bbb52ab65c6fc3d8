-- Place a ticket on a replica, queue it, or drop it. Twin: `core.dispatch.Pool.arm`.
--
-- KEYS    a pool's 18 keys (see lib/pool_state.lua)
-- ARGV    1 now_ms   ms, or "" for the server's clock (tests set it)
--         2 pool     text, told to gateways that are woken
--         3 gateway  text, the incarnation that asks
--         4 arm      msgpack map, `core.tickets.Arm`
-- RETURNS msgpack array: epoch, outcome, grants
--         outcome: {"placed", replica, boot_id, url, placement, prefix_matched}
--                  {"queued", position, expected_wait_ms} | {"dropped", reason, expected_wait_ms}
--         grants: of the caller's other tickets, each {ticket, outcome}

local function answer(ticket)
  if ticket.state == 'queued' then
    local place = place_in(RANKS[ticket.service_class], ticket.tenant, 1)
    return {'queued', place, wait_ms(ticket, 1)}
  end
  local outcome = outcome_of(ticket)
  if ticket.state == 'dropped' then forget(ticket) end
  return outcome
end

-- The answer to a ticket already here, or nil when it starts again.
local function rearm(known, arm)
  if known.state == 'queued' then
    dispatch(known.ticket)
    return answer(known)
  end
  if known.state == 'dropped' then return answer(known) end
  if not contains(arm.exclude, known.placed.replica) then
    return acknowledge(known.gateway, known.ticket)[2]
  end
  local replica = replica_of(known)
  if replica then pause(replica) end
  refund_ticket(known)
  forget(known)
  return nil
end

local function refusal(arm)
  if arm.deadline_ms > 0 and arm.deadline_ms <= pool.now_ms then return 'expired' end
  local reason = hopeless(arm.kv_blocks)
  if reason then return reason end
  local is_full = pool.counts[RANKS[arm.service_class]] >= RULES.queue.queue_max
  return is_full and not arm.at_head and 'queue_full' or nil
end

local function start(arm, gateway, is_back)
  local reason = refusal(arm)
  if reason then return {'dropped', reason, wait_ms(arm, 0)} end
  local ticket = new_ticket(arm, gateway)
  if waiting_count() == 0 and is_open() then
    enter_class(RANKS[ticket.service_class], ticket.tenant)
    leave_class(RANKS[ticket.service_class], ticket.tenant)
    local replica, in_lane = find_spot(ticket, false, 0, false)
    if replica then
      place(ticket, replica, in_lane, 'placed')
      return answer(ticket)
    end
  end
  enqueue(ticket, arm.at_head or is_back)
  dispatch(ticket.ticket)
  if not arm.at_head and not is_back then shed(ticket, arm.deadline_ms) end
  return answer(ticket)
end

register('arm', function(keys, args)
  local gateway, arm = args[3], cmsgpack.unpack(args[4])
  begin(keys, args[1])
  if not heard(gateway) then pool.owing[gateway] = true end
  local known = find_ticket(arm.ticket)
  local outcome = known and rearm(known, arm) or nil
  if not outcome then outcome = start(arm, gateway, known ~= nil) end
  local reply = cmsgpack.pack({pool.epoch, outcome, grants_for(gateway)})
  close_pool(gateway, args[2])
  return reply
end)
