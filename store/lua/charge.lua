-- Charge output by each ticket's absolute total, and keep the tickets held for another lease.
-- A ticket not held is held from now on, uncharged: that is how one survives a lost memory.
-- Twin: `core.limits.charge`.
--
-- KEYS    1 scopes, 2 held, 3 tickets, 4 idle (see lib/buckets.lua)
-- ARGV    1 now_ms  ms, or "" for the server's clock (tests set it)
--         2, 3, 4, 5, …  of each: ticket (text), output tokens so far (integer), the further
--                   scopes that it counts in (msgpack array of text)
-- RETURNS the number of tickets

register('charge', function(keys, args)
  open_tenant(keys, args[1])
  for i = 2, #args, 3 do
    local ticket, total = args[i], tonumber(args[i + 1])
    local held = find_held(ticket)
    if not held then
      held = hold({TENANT_SCOPE, unpack(cmsgpack.unpack(args[i + 2]))}, false)
      held.output_from, held.output_total = total, total
    elseif total > held.output_total then
      held.output_total = total
      charge_output(held)
    end
    touch(ticket, held)
  end
  close_tenant()
  return (#args - 1) / 3
end)
