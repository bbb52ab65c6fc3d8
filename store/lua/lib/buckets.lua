-- A tenant's state for one call: read it, bring it up to now, charge it, write it back.
-- The twin of `core/limits.py`, function by function. Used by admit, charge, finish_tenant
-- and cancel_tenant.
--
-- KEYS   1 levels   hash: now_ms, the four limits, the levels of three buckets (units)
--        2 held     sorted set: ticket -> expiry (ms)
--        3 charges  hash: ticket -> "charged:requests:input:output:output_total"
-- RULES  units, limit_max, debt_max, lease_ms, concurrency_retry_ms, sweep_max
-- ARGV    none: the script hands over what it takes from them
-- RETURNS nothing: it defines local functions for the script that follows

local LEVELS, HELD, CHARGES = KEYS[1], KEYS[2], KEYS[3]
local NAMES = {'requests', 'input_tokens', 'output_tokens'}
local FIELDS = {
  'now_ms', 'concurrency', 'requests_per_min', 'input_tokens_per_min', 'output_tokens_per_min',
  'requests', 'input_tokens', 'output_tokens',
}
local KEEP_MS = 60000 -- how long an idle tenant's state outlives its refilling

local tenant = {limits = {}, levels = {}}

local function server_now(now_arg)
  if now_arg ~= '' then return tonumber(now_arg) end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function wait_ms(level, need, limit)
  return math.max(0, math.ceil((need - level) / limit))
end

-- Refills to now and lets go of tickets that nobody touched for a lease.
local function open_tenant(now_arg)
  local found = redis.call('HMGET', LEVELS, unpack(FIELDS))
  local last_ms = tonumber(found[1] or 0)
  tenant.now_ms = math.max(last_ms, server_now(now_arg))
  tenant.concurrency = tonumber(found[2] or 0)
  for i, name in ipairs(NAMES) do
    local limit, level = tonumber(found[2 + i] or 0), tonumber(found[5 + i] or nil)
    tenant.limits[name] = limit
    if level then
      local elapsed_ms = tenant.now_ms - last_ms
      tenant.levels[name] = math.min(limit * RULES.units, level + elapsed_ms * limit)
    end
  end
  local gone = redis.call(
    'ZRANGE', HELD, '-inf', tenant.now_ms, 'BYSCORE', 'LIMIT', 0, RULES.sweep_max)
  if #gone > 0 then
    redis.call('ZREM', HELD, unpack(gone))
    redis.call('HDEL', CHARGES, unpack(gone))
  end
end

-- A bucket that is new, or was unlimited, starts full.
local function set_limits(concurrency, per_min)
  tenant.concurrency = concurrency
  for name, limit in pairs(per_min) do
    limit = math.min(limit, RULES.limit_max)
    tenant.limits[name] = limit
    local level = tenant.levels[name] or limit * RULES.units
    if limit == 0 then
      tenant.levels[name] = nil
    else
      tenant.levels[name] = math.max(-RULES.debt_max, math.min(limit * RULES.units, level))
    end
  end
end

local function find_held(ticket)
  local expires_ms = tonumber(redis.call('ZSCORE', HELD, ticket) or 0)
  if expires_ms <= tenant.now_ms then return nil end
  local charged, requests, input, output, total = string.match(
    redis.call('HGET', CHARGES, ticket), '(%d):(%d+):(%d+):(%d+):(%d+)')
  return {
    charged = charged == '1', requests = tonumber(requests), input_tokens = tonumber(input),
    output_tokens = tonumber(output), output_total = tonumber(total),
  }
end

local function touch(ticket, held)
  redis.call('ZADD', HELD, tenant.now_ms + RULES.lease_ms, ticket)
  redis.call('HSET', CHARGES, ticket, string.format('%d:%.0f:%.0f:%.0f:%.0f',
    held.charged and 1 or 0, held.requests, held.input_tokens, held.output_tokens,
    held.output_total))
end

local function let_go(ticket)
  redis.call('ZREM', HELD, ticket)
  redis.call('HDEL', CHARGES, ticket)
end

-- Charges what is new in the ticket's absolute total.
local function charge_output(held, total)
  local tokens = math.max(0, total - held.output_total)
  held.output_total = held.output_total + tokens
  local level = tenant.levels.output_tokens
  if level then
    tenant.levels.output_tokens = math.max(-RULES.debt_max, level - tokens * RULES.units)
    held.output_tokens = held.output_tokens + tokens * RULES.units
  end
end

-- Gives units back to a bucket, or takes them where negative; unlimited ones have no level.
local function refund(name, units)
  local level, limit = tenant.levels[name], tenant.limits[name]
  if level then
    tenant.levels[name] = math.max(
      -RULES.debt_max, math.min(limit * RULES.units, level + units))
  end
end

local function headroom()
  local told = {}
  for _, name in ipairs(NAMES) do
    local level, limit = tenant.levels[name], tenant.limits[name]
    told[#told + 1] = level and limit or 0
    told[#told + 1] = level and math.max(0, math.floor(level / RULES.units)) or 0
    told[#told + 1] = level and wait_ms(level, limit * RULES.units, limit) or 0
  end
  return told
end

local function close_tenant()
  local fields, full_ms = {'now_ms', tenant.now_ms, 'concurrency', tenant.concurrency}, 0
  local unlimited = {}
  for _, name in ipairs(NAMES) do
    local level, limit = tenant.levels[name], tenant.limits[name]
    fields[#fields + 1] = name .. '_per_min'
    fields[#fields + 1] = limit
    if level then
      fields[#fields + 1] = name
      fields[#fields + 1] = level
      full_ms = math.max(full_ms, wait_ms(level, limit * RULES.units, limit))
    else
      unlimited[#unlimited + 1] = name
    end
  end
  redis.call('HSET', LEVELS, unpack(fields))
  if #unlimited > 0 then redis.call('HDEL', LEVELS, unpack(unlimited)) end
  local keep_ms = full_ms + RULES.lease_ms + KEEP_MS
  for _, key in ipairs({LEVELS, HELD, CHARGES}) do redis.call('PEXPIRE', key, keep_ms) end
end
