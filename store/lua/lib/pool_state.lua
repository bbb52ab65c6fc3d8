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
--         16 rooms      sorted set: ready replica -> minus the largest ticket that fits
--         17 lives      hash: number of a replica's present life -> replica
--         18 open       hash: tenant -> its tickets on accounts, where there are any
-- RULES   every field of `core.dispatch.PoolRules`
-- ARGV    none: the script hands over what it takes from them
-- RETURNS nothing: it defines local functions for the script that follows

local K -- the keys, by name
local CLASSES = {'interactive', 'standard', 'batch'}
local RANKS = {interactive = 1, standard = 2, batch = 3}

local pool -- the state map; lists of three in it are by rank of class
-- What this call has read, and what it will write back.
local replicas, has_all_replicas, changed_replicas
local tickets, changed_tickets
local counters -- by tenant
local owners -- of prefix hashes
local woken -- gateways with a new outcome to fetch

-- What the last call to each pool left unpacked. It holds as long as the stored state is, byte
-- for byte, what that call wrote: every call writes another.
local memos, memo_count = {}, 0
local MEMOS_MAX = 64 -- pools

local function open_pool(keys, now_arg)
  K = {
    state = keys[1], replicas = keys[2], tickets = keys[3], owned = keys[4], gateways = keys[5],
    granted = keys[6], unacked = keys[7], unreported = keys[8], fifo = keys[9],
    waiting = {keys[10], keys[11], keys[12]},
    counters = keys[13], prefixes = keys[14], recency = keys[15],
    rooms = keys[16], lives = keys[17], open = keys[18],
  }
  replicas, has_all_replicas, changed_replicas = {}, false, {}
  tickets, changed_tickets = {}, {}
  counters, owners, woken = {}, {}, {}
  local now_ms = time_ms(now_arg)
  local stored = redis.call('GET', K.state)
  local memo = memos[K.state]
  -- Taken out, so that a call that fails halfway leaves none.
  if memo then memos[K.state], memo_count = nil, memo_count - 1 end
  if stored then
    if memo and memo.stored == stored then
      pool, replicas, has_all_replicas = memo.pool, memo.replicas, memo.has_all_replicas
    else
      pool = cmsgpack.unpack(stored)
    end
    pool.now_ms = math.max(pool.now_ms, now_ms)
    return
  end
  -- With the state everything else lost its meaning.
  redis.call('UNLINK', unpack(keys))
  pool = {
    epoch = '', now_ms = now_ms, started_ms = 0, empty_since_ms = 0, numbers = 0,
    stay_us = 0, samples = 0, stretch = {1000, 1000, 1000}, owing = {},
    open = 0, ready = 0, largest = 0, replicas = 0, -- of all replicas, as `core.replicas` has them
    counts = {0, 0, 0}, credits = {0, 0, 0}, floors = {0, 0, 0},
    base = 0, first_order = 0, last_order = 0, touches = 0,
    -- So that most calls need not look: sizes of two sets, and a time before which no lease ends.
    granted = 0, unacked = 0, lease_check_ms = 0,
    calls = 0,
  }
end

local function find_replica(name)
  if replicas[name] == nil and not has_all_replicas then
    local stored = redis.call('HGET', K.replicas, name)
    replicas[name] = stored and cmsgpack.unpack(stored) or nil
  end
  return replicas[name]
end

local function all_replicas()
  if not has_all_replicas then
    local found = redis.call('HGETALL', K.replicas)
    for i = 1, #found, 2 do
      replicas[found[i]] = replicas[found[i]] or cmsgpack.unpack(found[i + 1])
    end
    has_all_replicas = true
  end
  return replicas
end

local function change_replica(replica)
  replicas[replica.replica] = replica
  changed_replicas[replica.replica] = replica
end

local function delete_replica(replica)
  local name = replica.replica
  replicas[name], changed_replicas[name] = nil, nil
  redis.call('HDEL', K.replicas, name)
  redis.call('HDEL', K.lives, replica.number)
  redis.call('ZREM', K.rooms, name)
end

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

local function save_state()
  pool.calls = pool.calls + 1
  local stored = cmsgpack.pack(pool)
  redis.call('SET', K.state, stored)
  memo_count = memo_count + 1
  if memo_count > MEMOS_MAX then memos, memo_count = {}, 1 end
  memos[K.state] = {
    stored = stored, pool = pool, replicas = replicas, has_all_replicas = has_all_replicas,
  }
end

-- Writes everything back, and tells other gateways that something waits for them.
local function close_pool(caller, pool_name)
  for name, ticket in pairs(changed_tickets) do
    redis.call('HSET', K.tickets, name, cmsgpack.pack(ticket))
  end
  for name, replica in pairs(changed_replicas) do
    redis.call('HSET', K.replicas, name, cmsgpack.pack(replica))
  end
  if pool.epoch ~= '' then save_state() end
  woken[caller] = nil
  for gateway in pairs(woken) do redis.call('PUBLISH', 'wake:' .. gateway, pool_name) end
end
