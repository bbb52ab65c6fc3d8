-- Hear a gateway out, place what can be placed, and tell it its grants.
-- Twin: `core.dispatch.Pool.renew`.
--
-- KEYS    a pool's 15 keys (see lib/pool_state.lua)
-- ARGV    1 now_ms  ms, or "" for the server's clock (tests set it)
--         2 renew   msgpack map, `core.tickets.Renew`; its lists are bounded by the caller
-- RETURNS msgpack array: epoch, grants, reannounce (boolean), confirmed
--         grants and confirmed: each {ticket, outcome}, outcome as `arm` returns it

local renew = cmsgpack.unpack(ARGV[2])

-- Whether the gateway must announce what it holds, because that was lost or let go.
local function is_behind()
  local known = heard(renew.gateway)
  if renew.announces then
    pool.owing[renew.gateway] = nil
    return false
  end
  if not known or renew.epoch ~= pool.epoch then pool.owing[renew.gateway] = true end
  return pool.owing[renew.gateway] == true
end

local function announce_all()
  for _, view in ipairs(renew.replicas) do announce(view) end
  for name, replica in pairs(all_replicas()) do
    local silent_ms = pool.now_ms - replica.seen_ms
    if replica.open == 0 and silent_ms > RULES.placement.replica_silent_ms then
      replicas[name] = nil
      redis.call('HDEL', K.replicas, name)
    end
  end
  if next(replicas) ~= nil then
    pool.empty_since_ms = 0
  elseif pool.empty_since_ms == 0 then
    pool.empty_since_ms = pool.now_ms
  end
end

local function is_same(ticket, placed)
  if ticket.state == 'dropped' then return false end
  if not ticket.placed or not placed then return not ticket.placed and not placed end
  return ticket.placed.replica == placed.replica
    and ticket.placed.placement == placed.placement
end

-- The same ticket in the same state, under its gateway's present name.
local function take_over(ticket)
  untell(ticket)
  disown(ticket)
  ticket.gateway = renew.gateway
  own(ticket)
  if ticket.state == 'granted' then ticket.state = 'placed' end
  change_ticket(ticket)
end

-- Takes a ticket as its gateway has it, which is how things really are.
local function adopt(arm, placed)
  local known = find_ticket(arm.ticket)
  if known and is_same(known, placed) then return take_over(known) end
  if known then
    refund_ticket(known)
    forget(known)
  end
  local ticket = new_ticket(arm, renew.gateway)
  if not placed then return enqueue(ticket, arm.at_head or known ~= nil) end
  ticket.state, ticket.placed = 'placed', placed
  local replica = all_replicas()[placed.replica]
  if replica and replica.boot_id == placed.boot_id then
    hold(replica, ticket.ticket, placed.placement, ticket.kv_blocks)
    ticket.number = replica.number
  end
  charge_ticket(ticket, ticket.prompt_tokens, 0)
end

begin(ARGV[1])
local behind = is_behind()
announce_all()
for _, pair in ipairs(renew.held) do adopt(pair[1], pair[2]) end
local confirmed = {}
for _, name in ipairs(renew.acks) do
  confirmed[#confirmed + 1] = acknowledge(renew.gateway, name)
end
for _, output in ipairs(renew.outputs) do
  local ticket = find_ticket(output[1])
  if ticket and ticket.state == 'placed' and output[2] > ticket.output_tokens then
    charge_ticket(ticket, ticket.input_tokens, output[2])
  end
end
for _, told in ipairs(renew.loads) do
  local replica = all_replicas()[told[1]]
  if replica then report(replica, told[2]) end
end
dispatch('')
local reply = cmsgpack.pack({pool.epoch, grants_for(renew.gateway), behind, confirmed})
close_pool(renew.gateway, renew.pool)
return reply
