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
-- RETURNS msgpack array
--         {"stale", key, tenant}                                  booleans
--         {"admitted", "", 0, headroom…} | {"refused", reason, retry_after_ms, headroom…}
--         headroom: limit, remaining, reset_ms of requests, input and output tokens

local REASONS = {'requests', 'input_tokens', 'output_tokens'}

local function refusal(input_units)
  local needs, reason, retry_after_ms = {LIMITS.units, input_units, LIMITS.units}, nil, 0
  for i = REQUESTS, OUTPUT do
    local level = tenant.levels[i]
    local wait = level and wait_ms(level, needs[i], tenant.limits[i]) or 0
    if wait > 0 then
      reason = reason or REASONS[i]
      retry_after_ms = math.max(retry_after_ms, wait)
    end
  end
  if tenant.concurrency > 0
      and redis.call('ZCOUNT', HELD, '(' .. string.format('%.0f', tenant.now_ms), '+inf')
        >= tenant.concurrency then
    reason = reason or 'concurrency'
    retry_after_ms = math.max(retry_after_ms, LIMITS.concurrency_retry_ms)
  end
  return reason, retry_after_ms
end

local function answer(reason, retry_after_ms)
  local told = {reason and 'refused' or 'admitted', reason or '', retry_after_ms}
  for i = REQUESTS, OUTPUT do
    local level, limit = tenant.levels[i], tenant.limits[i]
    told[3 * i + 1] = limit
    told[3 * i + 2] = level and math.max(0, math.floor(level / LIMITS.units)) or 0
    told[3 * i + 3] = level and wait_ms(level, limit * LIMITS.units, limit) or 0
  end
  return cmsgpack.pack(told)
end

register('admit', function(keys, args)
  local known = redis.call('HMGET', keys[4], 'key:' .. args[3], 'tenant')
  local key_stale = tonumber(args[4]) < tonumber(known[1] or 0)
  local tenant_stale = tonumber(args[5]) < tonumber(known[2] or 0)
  if key_stale or tenant_stale then
    return cmsgpack.pack({'stale', key_stale, tenant_stale})
  end
  local ticket = args[2]
  open_tenant(keys, args[1])
  set_limits(tonumber(args[9]), {tonumber(args[6]), tonumber(args[7]), tonumber(args[8])})
  local held, reason, retry_after_ms = find_held(ticket), nil, 0
  if not held then
    local limit = tenant.limits[INPUT]
    local input_units = limit > 0 and math.min(tonumber(args[10]), limit) * LIMITS.units or 0
    reason, retry_after_ms = refusal(input_units)
    if not reason then
      held = {
        charged = true, requests = tenant.levels[REQUESTS] and LIMITS.units or 0,
        input_tokens = input_units, output_tokens = 0, output_total = 0,
      }
      refund(REQUESTS, -held.requests)
      refund(INPUT, -input_units)
    end
  end
  if held then touch(ticket, held) end
  close_tenant()
  return answer(reason, retry_after_ms)
end)
