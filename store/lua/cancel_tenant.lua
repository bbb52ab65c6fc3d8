-- Let go of a ticket and give back all that it was charged. Repeating it is harmless.
-- Twin: `core.limits.cancel`.
--
-- KEYS    1 scopes, 2 held, 3 tickets, 4 idle (see lib/buckets.lua)
-- ARGV    1 now_ms  ms, or "" for the server's clock (tests set it)
--         2 ticket  text
-- RETURNS 1 if the ticket was held, else 0

register('cancel_tenant', function(keys, args)
  open_tenant(keys, args[1])
  local held = find_held(args[2])
  if held then
    open_scopes(scopes_of(held))
    for place = 1, #held.flat, 4 do
      for i = REQUESTS, OUTPUT do
        refund(opened[held.flat[place]], i, held.flat[place + i])
      end
    end
    let_go(args[2], held)
  end
  close_tenant()
  return held and 1 or 0
end)
