-- Charge one request to its tenant's limits and hold its ticket, or charge nothing.
-- Twin: `core.limits.admit`, after `core.limits.check_versions` for key and tenant.
--
-- KEYS    1 levels, 2 held, 3 charges (see lib/buckets.lua)
--         4 versions  hash: "tenant", "key:<id>" -> newest version pushed
-- ARGV    1 now_ms    ms, or "" for the server's clock (tests set it)
--         2 ticket    text
--         3 key       text, the API key's id
--         4 key_version, 5 tenant_version           integers, what the gateway decided from
--         6 requests_per_min, 7 input_tokens_per_min, 8 output_tokens_per_min, 9 concurrency
--                     integers, 0 is unlimited
--         10 input_tokens  integer, net of the expected prefix match
-- RETURNS {"stale", key 0|1, tenant 0|1}
--         {"admitted", "", 0, headroom…} | {"refused", reason, retry_after_ms, headroom…}
--         headroom: limit, remaining, reset_ms of requests, input and output tokens

local known = redis.call('HMGET', KEYS[4], 'key:' .. ARGV[3], 'tenant')
local key_stale = tonumber(ARGV[4]) < tonumber(known[1] or 0)
local tenant_stale = tonumber(ARGV[5]) < tonumber(known[2] or 0)
if key_stale or tenant_stale then
  return {'stale', key_stale and 1 or 0, tenant_stale and 1 or 0}
end

local ticket = ARGV[2]
open_tenant(ARGV[1])
set_limits(tonumber(ARGV[9]), {
  requests = tonumber(ARGV[6]), input_tokens = tonumber(ARGV[7]), output_tokens = tonumber(ARGV[8]),
})

local function refusal(input_units)
  local needs = {requests = RULES.units, input_tokens = input_units, output_tokens = RULES.units}
  local reason, retry_after_ms = nil, 0
  for _, name in ipairs(NAMES) do
    local level = tenant.levels[name]
    local wait = level and wait_ms(level, needs[name], tenant.limits[name]) or 0
    if wait > 0 then
      reason = reason or name
      retry_after_ms = math.max(retry_after_ms, wait)
    end
  end
  if tenant.concurrency > 0
      and redis.call('ZCOUNT', HELD, '(' .. string.format('%.0f', tenant.now_ms), '+inf')
        >= tenant.concurrency then
    reason = reason or 'concurrency'
    retry_after_ms = math.max(retry_after_ms, RULES.concurrency_retry_ms)
  end
  return reason, retry_after_ms
end

local held = find_held(ticket)
local reason, retry_after_ms = nil, 0
if not held then
  local limit = tenant.limits.input_tokens
  local input_units = limit > 0 and math.min(tonumber(ARGV[10]), limit) * RULES.units or 0
  reason, retry_after_ms = refusal(input_units)
  if not reason then
    held = {
      charged = true, requests = tenant.levels.requests and RULES.units or 0,
      input_tokens = input_units, output_tokens = 0, output_total = 0,
    }
    refund('requests', -held.requests)
    refund('input_tokens', -input_units)
  end
end
if held then touch(ticket, held) end
close_tenant()
return {reason and 'refused' or 'admitted', reason or '', retry_after_ms, unpack(headroom())}
