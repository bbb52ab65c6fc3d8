-- Charge one request to every scope of its tenant that it counts in, and hold its ticket; or
-- charge nothing anywhere.
-- Twin: `core.limits.admit`, after `core.limits.check_versions` for key and tenant.
--
-- KEYS    1 scopes, 2 held, 3 tickets, 4 idle (see lib/buckets.lua)
--         5 versions  hash: "tenant", "key:<id>" -> newest version pushed
-- ARGV    1 now_ms    ms, or "" for the server's clock (tests set it)
--         2 ticket    text
--         3 key       text, the API key's id
--         4 key_version, 5 tenant_version           integers, what the gateway decided from
--         6 input_tokens   integer, net of the expected prefix match
--         7 output_tokens  integer, the most it may produce; 0 holds nothing of an answer
--         8 … 12, 13 … 17, …  the scopes in order, the tenant's first: name (text),
--                     requests_per_min, input_tokens_per_min, output_tokens_per_min, concurrency
--                     (integers, 0 is unlimited)
-- RETURNS msgpack array
--         {"stale", key, tenant}                                  booleans
--         {"admitted", "", "", 0, rooms…} | {"refused", scope, reason, retry_after_ms, rooms…}
--         rooms: for each scope limit, remaining, reset_ms of requests, input and output tokens

local REASONS = {'requests', 'input_tokens', 'output_tokens'}
local FIRST_SCOPE = 8

local function input_units(scope, tokens)
  return math.min(tokens, scope.limits[INPUT]) * LIMITS.units
end

local function refusal(names, input_tokens)
  local in_the_way, reason, retry_after_ms = nil, nil, 0
  local function wait_for(name, what, wait)
    if wait > 0 then
      in_the_way, reason = in_the_way or name, reason or what
      retry_after_ms = math.max(retry_after_ms, wait)
    end
  end
  for _, name in ipairs(names) do
    local scope = opened[name]
    local needs = {LIMITS.units, input_units(scope, input_tokens), LIMITS.units}
    for i = REQUESTS, OUTPUT do
      local level = scope.levels[i]
      if level then wait_for(name, REASONS[i], wait_ms(level, needs[i], scope.limits[i])) end
    end
    if scope.concurrency > 0 and scope.held >= scope.concurrency then
      wait_for(name, 'concurrency', LIMITS.concurrency_retry_ms)
    end
  end
  return in_the_way, reason, retry_after_ms
end

local function charged(names, input_tokens, output_tokens)
  local held = hold(names, true)
  for j, name in ipairs(names) do
    local scope, place = opened[name], 4 * (j - 1) + 1
    local output = scope.levels[OUTPUT]
    local most = math.min(output_tokens, LIMITS.output_hold_tokens)
    local units = {
      scope.levels[REQUESTS] and LIMITS.units or 0,
      input_units(scope, input_tokens),
      output and math.min(most, math.floor(output / LIMITS.units)) * LIMITS.units or 0,
    }
    for i = REQUESTS, OUTPUT do
      held.flat[place + i] = units[i]
      refund(scope, i, -units[i])
    end
  end
  return held
end

local function answer(names, in_the_way, reason, retry_after_ms)
  local told = {reason and 'refused' or 'admitted', in_the_way or '', reason or '', retry_after_ms}
  for _, name in ipairs(names) do tell_room(told, opened[name]) end
  return cmsgpack.pack(told)
end

register('admit', function(keys, args)
  local known = redis.call('HMGET', keys[5], 'key:' .. args[3], 'tenant')
  local key_stale = tonumber(args[4]) < tonumber(known[1] or 0)
  local tenant_stale = tonumber(args[5]) < tonumber(known[2] or 0)
  if key_stale or tenant_stale then
    return cmsgpack.pack({'stale', key_stale, tenant_stale})
  end
  local ticket, input_tokens, output_tokens = args[2], tonumber(args[6]), tonumber(args[7])
  open_tenant(keys, args[1])
  local names = read_scopes(args, FIRST_SCOPE)
  local held, in_the_way, reason, retry_after_ms = find_held(ticket), nil, nil, 0
  if not held then
    in_the_way, reason, retry_after_ms = refusal(names, input_tokens)
    if not reason then held = charged(names, input_tokens, output_tokens) end
  end
  if held then touch(ticket, held) end
  close_tenant()
  return answer(names, in_the_way, reason, retry_after_ms)
end)
