-- Let go of a finished ticket and true up its charge to what was actually read and produced.
-- Twin: `core.limits.finish`.
--
-- KEYS    1 scopes, 2 held, 3 tickets, 4 idle (see lib/buckets.lua)
-- ARGV    1 now_ms        ms, or "" for the server's clock (tests set it)
--         2 ticket        text
--         3 input_tokens  integer, read and not from the prefix cache
--         4 output_total  integer, tokens produced
-- RETURNS 1 if the ticket was held, else 0

register('finish_tenant', function(keys, args)
  open_tenant(keys, args[1])
  local held = find_held(args[2])
  if held then
    local read = tonumber(args[3]) * LIMITS.units
    local produced = math.max(held.output_total, tonumber(args[4])) - held.output_from
    open_scopes(scopes_of(held))
    for place = 1, #held.flat, 4 do
      local scope = opened[held.flat[place]]
      if held.charged then refund(scope, INPUT, held.flat[place + INPUT] - read) end
      refund(scope, OUTPUT, held.flat[place + OUTPUT] - produced * LIMITS.units)
    end
    let_go(args[2], held)
  end
  close_tenant()
  return held and 1 or 0
end)
