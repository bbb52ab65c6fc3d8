-- A tenant's state for one call: read it, bring it up to now, charge it, write it back.
-- The twin of `core/limits.py`, function by function. Used by admit, charge, finish_tenant
-- and cancel_tenant.
--
-- KEYS    1 levels   string, msgpack: {now_ms, concurrency, per minute limits, levels}; the
--                    last two of requests, input and output tokens; a level is in units,
--                    false where there is no limit
--         2 held     sorted set: ticket -> expiry (ms)
--         3 charges  hash: ticket -> msgpack {charged, requests, input, output, output_total}
-- ARGV    none: the function hands over what it takes from them
-- LIMITS  units, limit_max, debt_max, lease_ms, concurrency_retry_ms, sweep_max
-- RETURNS nothing: it defines local functions for those that follow

local REQUESTS, INPUT, OUTPUT = 1, 2, 3
local KEEP_MS = 60000 -- how long an idle tenant's levels outlive their refilling

local LEVELS, HELD, CHARGES -- keys of the tenant of this call
local tenant -- its state, until `close_tenant`

local function wait_ms(level, need, limit)
  return math.max(0, math.ceil((need - level) / limit))
end

-- Refills to now and lets go of tickets that nobody touched for a lease.
local function open_tenant(keys, now_arg)
  LEVELS, HELD, CHARGES = keys[1], keys[2], keys[3]
  local stored = redis.call('GET', LEVELS)
  local last_ms, concurrency, limits, levels = 0, 0, {0, 0, 0}, {false, false, false}
  if stored then last_ms, concurrency, limits, levels = unpack(cmsgpack.unpack(stored)) end
  local now_ms = math.max(last_ms, time_ms(now_arg))
  for i = REQUESTS, OUTPUT do
    if levels[i] then
      local limit = limits[i]
      levels[i] = math.min(limit * LIMITS.units, levels[i] + (now_ms - last_ms) * limit)
    end
  end
  tenant = {now_ms = now_ms, concurrency = concurrency, limits = limits, levels = levels}
  local gone = redis.call('ZRANGE', HELD, '-inf', now_ms, 'BYSCORE', 'LIMIT', 0, LIMITS.sweep_max)
  if #gone > 0 then
    redis.call('ZREM', HELD, unpack(gone))
    redis.call('HDEL', CHARGES, unpack(gone))
  end
end

local function clamped(level, limit)
  return math.max(-LIMITS.debt_max, math.min(limit * LIMITS.units, level))
end

-- A bucket that is new, or was unlimited, starts full.
local function set_limits(concurrency, per_min)
  tenant.concurrency = concurrency
  for i = REQUESTS, OUTPUT do
    local limit = math.min(per_min[i], LIMITS.limit_max)
    tenant.limits[i] = limit
    tenant.levels[i] = limit > 0 and clamped(tenant.levels[i] or limit * LIMITS.units, limit)
  end
end

local function find_held(ticket)
  local expires_ms = tonumber(redis.call('ZSCORE', HELD, ticket) or 0)
  if expires_ms <= tenant.now_ms then return nil end
  local charged, requests, input, output, total = unpack(
    cmsgpack.unpack(redis.call('HGET', CHARGES, ticket)))
  return {
    charged = charged, requests = requests, input_tokens = input, output_tokens = output,
    output_total = total,
  }
end

local function touch(ticket, held)
  redis.call('ZADD', HELD, tenant.now_ms + LIMITS.lease_ms, ticket)
  redis.call('HSET', CHARGES, ticket, cmsgpack.pack({
    held.charged, held.requests, held.input_tokens, held.output_tokens, held.output_total,
  }))
end

local function let_go(ticket)
  redis.call('ZREM', HELD, ticket)
  redis.call('HDEL', CHARGES, ticket)
end

-- Charges what is new in the ticket's absolute total.
local function charge_output(held, total)
  local tokens = math.max(0, total - held.output_total)
  held.output_total = held.output_total + tokens
  local level = tenant.levels[OUTPUT]
  if level then
    tenant.levels[OUTPUT] = math.max(-LIMITS.debt_max, level - tokens * LIMITS.units)
    held.output_tokens = held.output_tokens + tokens * LIMITS.units
  end
end

-- Gives units back to a bucket, or takes them where negative; unlimited ones have no level.
local function refund(i, units)
  if tenant.levels[i] then
    tenant.levels[i] = clamped(tenant.levels[i] + units, tenant.limits[i])
  end
end

local function close_tenant()
  local full_ms = 0
  for i = REQUESTS, OUTPUT do
    local level, limit = tenant.levels[i], tenant.limits[i]
    if level then full_ms = math.max(full_ms, wait_ms(level, limit * LIMITS.units, limit)) end
  end
  local state = {tenant.now_ms, tenant.concurrency, tenant.limits, tenant.levels}
  redis.call('SET', LEVELS, cmsgpack.pack(state), 'PX', full_ms + LIMITS.lease_ms + KEEP_MS)
end
