-- Charge output by each ticket's absolute total, and keep the tickets held for another lease.
-- A ticket not held is held from now on, uncharged: that is how one survives a lost memory.
-- Twin: `core.limits.charge`.
--
-- KEYS    1 levels, 2 held, 3 charges (see lib/buckets.lua)
-- ARGV    1 now_ms  ms, or "" for the server's clock (tests set it)
--         2, 3, …   pairs: ticket (text), output tokens so far (integer)
-- RETURNS the number of pairs

register('charge', function(keys, args)
  open_tenant(keys, args[1])
  for i = 2, #args, 2 do
    local ticket, total = args[i], tonumber(args[i + 1])
    local held = find_held(ticket)
    if held then
      charge_output(held, total)
    else
      held = {
        charged = false, requests = 0, input_tokens = 0, output_tokens = 0, output_total = total,
      }
    end
    touch(ticket, held)
  end
  close_tenant()
  return (#args - 1) / 2
end)
