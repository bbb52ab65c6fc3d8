-- A tenant's state for one call: read what is needed of it, bring that up to now, charge it,
-- write it back. The twin of `core/limits.py`, function by function. Used by admit, look,
-- charge, finish_tenant and cancel_tenant.
--
-- KEYS    1 scopes   hash: "now" -> ms of the last call; scope -> msgpack {at_ms, concurrency,
--                    three limits per minute, three levels, tickets held}; limits and levels
--                    are of requests, input and output tokens; a level is in units, false
--                    where there is no limit
--         2 held     sorted set: ticket -> expiry (ms)
--         3 tickets  hash: ticket -> msgpack {charged, output_from, output_total,
--                    {scope, requests, input, output, scope, …}}
--         4 idle     sorted set: scope -> from when on it is as good as new (ms)
-- ARGV    none: the function hands over what it takes from them
-- LIMITS  units, limit_max, debt_max, and the rules of `core.limits.LimitRules`
-- RETURNS nothing: it defines local functions for those that follow

local REQUESTS, INPUT, OUTPUT = 1, 2, 3
local TENANT_SCOPE = 'tenant'
local SCOPE_PARTS = 5 -- of a scope in ARGV: its name, three limits per minute, concurrency
local KEEP_MS = 60000 -- how long an idle tenant's levels outlive their refilling

local SCOPES, HELD, TICKETS, IDLE -- keys of the tenant of this call
local now_ms -- of this call; it never falls
local opened -- scope -> its state, until `close_tenant`

local function integer(number)
  return string.format('%.0f', number)
end

local function wait_ms(level, need, limit)
  return math.max(0, math.ceil((need - level) / limit))
end

-- One nobody knows is as good as new.
local function unpacked(packed)
  if not packed then
    return {at_ms = now_ms, concurrency = 0, limits = {0, 0, 0}, levels = {false, false, false},
      held = 0}
  end
  local at_ms, concurrency, l1, l2, l3, v1, v2, v3, held = unpack(cmsgpack.unpack(packed))
  return {at_ms = at_ms, concurrency = concurrency, limits = {l1, l2, l3}, levels = {v1, v2, v3},
    held = held}
end

-- Reads those of the scopes that are not open yet, refilled to now.
local function open_scopes(names)
  local missing = {}
  for _, name in ipairs(names) do
    if not opened[name] then
      opened[name] = true
      missing[#missing + 1] = name
    end
  end
  if #missing == 0 then return end
  local stored = redis.call('HMGET', SCOPES, unpack(missing))
  for j, name in ipairs(missing) do
    local scope = unpacked(stored[j])
    for i = REQUESTS, OUTPUT do
      if scope.levels[i] then
        local limit = scope.limits[i]
        scope.levels[i] = math.min(
          limit * LIMITS.units, scope.levels[i] + (now_ms - scope.at_ms) * limit)
      end
    end
    scope.at_ms = now_ms
    opened[name] = scope
  end
end

local function full_wait_ms(scope)
  local longest_ms = 0
  for i = REQUESTS, OUTPUT do
    local level, limit = scope.levels[i], scope.limits[i]
    if level then
      longest_ms = math.max(longest_ms, wait_ms(level, limit * LIMITS.units, limit))
    end
  end
  return longest_ms
end

local function clamped(level, limit)
  return math.max(-LIMITS.debt_max, math.min(limit * LIMITS.units, level))
end

-- A bucket that is new, or was unlimited, starts full.
local function set_limits(scope, concurrency, per_min)
  scope.concurrency = concurrency
  for i = REQUESTS, OUTPUT do
    local limit = math.min(per_min[i], LIMITS.limit_max)
    scope.limits[i] = limit
    scope.levels[i] = limit > 0 and clamped(scope.levels[i] or limit * LIMITS.units, limit)
  end
end

-- Gives units back to a bucket, or takes them where negative; unlimited ones have no level.
local function refund(scope, i, units)
  if scope.levels[i] then
    scope.levels[i] = clamped(scope.levels[i] + units, scope.limits[i])
  end
end

local function unpacked_held(packed)
  local held = {}
  held.charged, held.output_from, held.output_total, held.flat = unpack(cmsgpack.unpack(packed))
  return held
end

-- Names of the scopes that a ticket counts in; each has its place in `flat`, before its charges.
local function scopes_of(held)
  local names = {}
  for i = 1, #held.flat, 4 do names[#names + 1] = held.flat[i] end
  return names
end

local function uncount(held)
  local names = scopes_of(held)
  open_scopes(names)
  for _, name in ipairs(names) do
    opened[name].held = math.max(0, opened[name].held - 1)
  end
end

local function let_go(ticket, held)
  uncount(held)
  redis.call('ZREM', HELD, ticket)
  redis.call('HDEL', TICKETS, ticket)
end

-- Scopes as good as new are forgotten, a few at each call.
local function forget()
  local names = redis.call('ZRANGE', IDLE, '-inf', now_ms, 'BYSCORE', 'LIMIT', 0, LIMITS.forget_max)
  if #names == 0 then return end
  local stored = redis.call('HMGET', SCOPES, unpack(names))
  for j, name in ipairs(names) do
    if unpacked(stored[j]).held > 0 then
      redis.call('ZADD', IDLE, now_ms + LIMITS.lease_ms, name)
    else
      redis.call('HDEL', SCOPES, name)
      redis.call('ZREM', IDLE, name)
    end
  end
end

-- Lets go of tickets that nobody touched for a lease.
local function sweep()
  local gone = redis.call('ZRANGE', HELD, '-inf', now_ms, 'BYSCORE', 'LIMIT', 0, LIMITS.lapsed_max)
  if #gone == 0 then return end
  for _, packed in ipairs(redis.call('HMGET', TICKETS, unpack(gone))) do
    if packed then uncount(unpacked_held(packed)) end
  end
  redis.call('ZREM', HELD, unpack(gone))
  redis.call('HDEL', TICKETS, unpack(gone))
end

local function begin_tenant(keys, now_arg)
  SCOPES, HELD, TICKETS, IDLE = keys[1], keys[2], keys[3], keys[4]
  opened = {}
  now_ms = math.max(tonumber(redis.call('HGET', SCOPES, 'now') or 0), time_ms(now_arg))
end

local function open_tenant(keys, now_arg)
  begin_tenant(keys, now_arg)
  forget()
  sweep()
end

-- Nil for one past its lease, which is let go of.
local function find_held(ticket)
  local packed = redis.call('HGET', TICKETS, ticket)
  if not packed then return nil end
  local held = unpacked_held(packed)
  if tonumber(redis.call('ZSCORE', HELD, ticket) or 0) <= now_ms then
    let_go(ticket, held)
    return nil
  end
  return held
end

-- A ticket to be touched, which counts in these scopes.
local function hold(names, charged)
  open_scopes(names)
  local held = {charged = charged, output_from = 0, output_total = 0, flat = {}}
  for _, name in ipairs(names) do
    opened[name].held = opened[name].held + 1
    local flat, place = held.flat, #held.flat + 1
    flat[place], flat[place + 1], flat[place + 2], flat[place + 3] = name, 0, 0, 0
  end
  return held
end

local function touch(ticket, held)
  redis.call('ZADD', HELD, now_ms + LIMITS.lease_ms, ticket)
  redis.call('HSET', TICKETS, ticket, cmsgpack.pack({
    held.charged, held.output_from, held.output_total, held.flat,
  }))
end

-- What was held for the answer to come is used up first.
local function charge_output(held)
  local due = (held.output_total - held.output_from) * LIMITS.units
  open_scopes(scopes_of(held))
  for place = 1, #held.flat, 4 do
    local scope, units = opened[held.flat[place]], held.flat[place + OUTPUT]
    if scope.levels[OUTPUT] and due > units then
      refund(scope, OUTPUT, units - due)
      held.flat[place + OUTPUT] = due
    end
  end
end

-- Opens the scopes named from args[first] on, each with its four limits, under these limits;
-- returns their names, in order.
local function read_scopes(args, first)
  local names = {}
  for i = first, #args, SCOPE_PARTS do names[#names + 1] = args[i] end
  open_scopes(names)
  for j, name in ipairs(names) do
    local i = first + (j - 1) * SCOPE_PARTS
    local per_min = {tonumber(args[i + 1]), tonumber(args[i + 2]), tonumber(args[i + 3])}
    set_limits(opened[name], tonumber(args[i + 4]), per_min)
  end
  return names
end

-- Appends what is left of a scope: limit, remaining, reset_ms of each bucket.
local function tell_room(told, scope)
  for i = REQUESTS, OUTPUT do
    local level, limit = scope.levels[i], scope.limits[i]
    told[#told + 1] = limit
    told[#told + 1] = level and math.max(0, math.floor(level / LIMITS.units)) or 0
    told[#told + 1] = level and wait_ms(level, limit * LIMITS.units, limit) or 0
  end
end

local function close_tenant()
  local fields, idle, keep_ms = {'now', integer(now_ms)}, {}, LIMITS.lease_ms
  for name, scope in pairs(opened) do
    local idle_ms = full_wait_ms(scope) + (scope.held > 0 and LIMITS.lease_ms or 0)
    keep_ms = math.max(keep_ms, idle_ms)
    fields[#fields + 1] = name
    local limits, levels = scope.limits, scope.levels
    fields[#fields + 1] = cmsgpack.pack({
      scope.at_ms, scope.concurrency, limits[1], limits[2], limits[3], levels[1], levels[2],
      levels[3], scope.held,
    })
    idle[#idle + 1] = integer(now_ms + idle_ms)
    idle[#idle + 1] = name
  end
  redis.call('HSET', SCOPES, unpack(fields))
  if #idle > 0 then redis.call('ZADD', IDLE, unpack(idle)) end
  if redis.call('PTTL', SCOPES) < keep_ms + LIMITS.lease_ms then
    redis.call('PEXPIRE', SCOPES, integer(keep_ms + KEEP_MS))
    redis.call('PEXPIRE', IDLE, integer(keep_ms + KEEP_MS))
  end
end
