-- Let go of a finished ticket and true up its charge to what was actually read and produced.
-- Twin: `core.limits.finish`.
--
-- KEYS    1 levels, 2 held, 3 charges (see lib/buckets.lua)
-- ARGV    1 now_ms        ms, or "" for the server's clock (tests set it)
--         2 ticket        text
--         3 input_tokens  integer, read and not from the prefix cache
--         4 output_total  integer, tokens produced
-- RETURNS 1 if the ticket was held, else 0

register('finish_tenant', function(keys, args)
  open_tenant(keys, args[1])
  local held = find_held(args[2])
  if held then
    charge_output(held, tonumber(args[4]))
    if held.charged then
      refund(INPUT, held.input_tokens - tonumber(args[3]) * LIMITS.units)
    end
    let_go(args[2])
  end
  close_tenant()
  return held and 1 or 0
end)
