-- A pool's state for one call: its keys, its clock, and what is cached until `close_pool`.
-- Used by arm, renew, finish_pool and cancel_pool, beneath the other pool libraries.
--
-- KEYS    1 state       string, msgpack map: epoch, clock, counts; absent is a lost memory
--         2 replicas    hash: replica -> msgpack map, one `core.placement.Replica`
--         3 tickets     hash: ticket -> msgpack map, one `core.dispatch.Ticket`
--         4 owned       sorted set, all scores 0: "gateway|ticket"
--         5 gateways    sorted set: gateway -> end of its lease (ms)
--         6 granted     sorted set, all scores 0: "gateway|ticket", an outcome not yet told
--         7 unacked     sorted set: granted ticket -> when it returns to the head (ms)
--         8 unreported  sorted set, all scores 0: "number|placement|blocks|ticket"
--         9 fifo        sorted set, all scores 0: "class|tenant|order|ticket"
--         10 interactive, 11 standard, 12 batch
--                       sorted sets: tenant with waiting tickets -> its counter
--         13 counters   sorted set: tenant -> counter, also of those not waiting
--         14 prefixes   hash: prefix hash -> "number,number…", oldest first
--         15 recency    sorted set: prefix hash -> when it was last recorded (a count)
-- RULES   every field of `core.dispatch.PoolRules`
-- ARGV    none: the script hands over what it takes from them
-- RETURNS nothing: it defines local functions for the script that follows

local K = {
  state = KEYS[1], replicas = KEYS[2], tickets = KEYS[3], owned = KEYS[4], gateways = KEYS[5],
  granted = KEYS[6], unacked = KEYS[7], unreported = KEYS[8], fifo = KEYS[9],
  waiting = {interactive = KEYS[10], standard = KEYS[11], batch = KEYS[12]},
  counters = KEYS[13], prefixes = KEYS[14], recency = KEYS[15],
}
local CLASSES = {'interactive', 'standard', 'batch'} -- by rank
local RANKS = {interactive = 1, standard = 2, batch = 3}

local pool -- the state map
local replicas -- by name, once any was needed
local tickets, changed_tickets, changed_replicas = {}, {}, {}
local woken = {} -- gateways with a new outcome to fetch

local function open_pool(now_arg)
  local now_ms
  if now_arg ~= '' then
    now_ms = tonumber(now_arg)
  else
    local time = redis.call('TIME')
    now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  local stored = redis.call('GET', K.state)
  if stored then
    pool = cmsgpack.unpack(stored)
    pool.now_ms = math.max(pool.now_ms, now_ms)
    return
  end
  -- With the state everything else lost its meaning.
  redis.call('UNLINK', unpack(KEYS))
  pool = {
    epoch = '', now_ms = now_ms, started_ms = 0, empty_since_ms = 0, numbers = 0,
    window_start_ms = 0, window_count = 0, window_before = 0, owing = {},
    counts = {interactive = 0, standard = 0, batch = 0},
    credits = {interactive = 0, standard = 0, batch = 0},
    floors = {interactive = 0, standard = 0, batch = 0},
    base = 0, first_order = 0, last_order = 0, touches = 0,
  }
end

local function all_replicas()
  if not replicas then
    replicas = {}
    local found = redis.call('HGETALL', K.replicas)
    for i = 1, #found, 2 do replicas[found[i]] = cmsgpack.unpack(found[i + 1]) end
  end
  return replicas
end

local function change_replica(replica) changed_replicas[replica.replica] = replica end

local function find_ticket(name)
  if tickets[name] == nil then
    local stored = redis.call('HGET', K.tickets, name)
    tickets[name] = stored and cmsgpack.unpack(stored) or false
  end
  return tickets[name] or nil
end

local function change_ticket(ticket)
  tickets[ticket.ticket] = ticket
  changed_tickets[ticket.ticket] = ticket
end

local function delete_ticket(name)
  tickets[name] = false
  changed_tickets[name] = nil
  redis.call('HDEL', K.tickets, name)
end

-- Members of a set whose scores are all 0, by their common beginning.
local function beginning(key, prefix, count)
  return redis.call('ZRANGE', key, '[' .. prefix .. '|', '(' .. prefix .. '}', 'BYLEX',
    'LIMIT', 0, count)
end

-- Writes everything back, and tells other gateways that something waits for them.
local function close_pool(caller, pool_name)
  for name, ticket in pairs(changed_tickets) do
    redis.call('HSET', K.tickets, name, cmsgpack.pack(ticket))
  end
  for name, replica in pairs(changed_replicas) do
    if all_replicas()[name] == replica then
      redis.call('HSET', K.replicas, name, cmsgpack.pack(replica))
    end
  end
  if pool.epoch ~= '' then redis.call('SET', K.state, cmsgpack.pack(pool)) end
  woken[caller] = nil
  for gateway in pairs(woken) do redis.call('PUBLISH', 'wake:' .. gateway, pool_name) end
end
