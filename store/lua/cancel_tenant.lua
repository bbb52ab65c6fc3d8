-- Let go of a ticket and give back all that it was charged. Repeating it is harmless.
-- Twin: `core.limits.cancel`.
--
-- KEYS    1 levels, 2 held, 3 charges (see lib/buckets.lua)
-- ARGV    1 now_ms  ms, or "" for the server's clock (tests set it)
--         2 ticket  text
-- RETURNS 1 if the ticket was held, else 0

open_tenant(ARGV[1])
local held = find_held(ARGV[2])
if held then
  refund('requests', held.requests)
  refund('input_tokens', held.input_tokens)
  refund('output_tokens', held.output_tokens)
  let_go(ARGV[2])
end
close_tenant()
return held and 1 or 0
