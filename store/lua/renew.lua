-- Hear a gateway out, place what can be placed, and tell it its grants.
-- Twin: `core.dispatch.Pool.renew`.
--
-- KEYS    a pool's 18 keys (see lib/pool_state.lua)
-- ARGV    1 now_ms  ms, or "" for the server's clock (tests set it)
--         2 renew   msgpack map, `core.tickets.Renew`; its lists are bounded by the caller
-- RETURNS msgpack array: epoch, grants, reannounce (boolean), confirmed, congestion (ms)
--         grants and confirmed: each {ticket, outcome}, outcome as `arm` returns it

-- Whether the gateway must announce what it holds, because that was lost or let go.
local function is_behind(renew)
  local known = heard(renew.gateway)
  if renew.announces then
    pool.owing[renew.gateway] = nil
    return false
  end
  if not known or renew.epoch ~= pool.epoch then pool.owing[renew.gateway] = true end
  return pool.owing[renew.gateway] == true
end

local function is_same(ticket, placed)
  if ticket.state == 'dropped' then return false end
  if not ticket.placed or not placed then return not ticket.placed and not placed end
  return ticket.placed.replica == placed.replica
    and ticket.placed.placement == placed.placement
end

-- The same ticket in the same state, under its gateway's present name.
local function take_over(ticket, gateway)
  untell(ticket)
  disown(ticket)
  ticket.gateway = gateway
  own(ticket)
  if ticket.state == 'granted' then ticket.state = 'placed' end
  change_ticket(ticket)
end

-- Takes a ticket as its gateway has it, which is how things really are.
local function adopt(arm, placed, gateway)
  local known = find_ticket(arm.ticket)
  if known and is_same(known, placed) then return take_over(known, gateway) end
  if known then
    refund_ticket(known)
    forget(known)
  end
  local ticket = new_ticket(arm, gateway)
  if not placed then return enqueue(ticket, arm.at_head or known ~= nil) end
  ticket.state, ticket.placed = 'placed', placed
  local replica = find_replica(placed.replica)
  if replica and replica.boot_id == placed.boot_id then
    hold_ticket(ticket, replica)
  end
  charge_ticket(ticket, ticket.prompt_tokens, 0)
end

local function charge_outputs(outputs)
  for _, output in ipairs(outputs) do
    local ticket = find_ticket(output[1])
    if ticket and ticket.state == 'placed' and output[2] > ticket.output_tokens then
      charge_ticket(ticket, ticket.input_tokens, output[2])
    end
  end
end

register('renew', function(keys, args)
  local renew = cmsgpack.unpack(args[2])
  begin(keys, args[1])
  local behind = is_behind(renew)
  announce_all(renew.replicas)
  for _, pair in ipairs(renew.held) do adopt(pair[1], pair[2], renew.gateway) end
  local confirmed = {}
  for _, name in ipairs(renew.acks) do
    confirmed[#confirmed + 1] = acknowledge(renew.gateway, name)
  end
  charge_outputs(renew.outputs)
  for _, told in ipairs(renew.loads) do
    local replica = find_replica(told[1])
    if replica then report(replica, told[2]) end
  end
  dispatch('')
  local reply = cmsgpack.pack({pool.epoch, grants_for(renew.gateway), behind, confirmed, congestion_ms()})
  close_pool(renew.gateway, renew.pool)
  return reply
end)
