-- A pool's replicas, and the choice of one for a ticket in a time that hardly grows with them.
-- The twin of `core/replicas.py`, function by function. Used by the pool scripts.
--
-- KEYS    2 replicas, 16 rooms, 17 lives (see pool_state.lua)
-- RULES   placement.*
-- ARGV    none: the script hands over what it takes from them
-- RETURNS nothing: it defines local functions for the script that follows

-- Puts the replica where its room belongs, and writes it back at the end.
local function rank_room(replica)
  if replica.ready then
    local room = room_in(replica)
    if replica.ranked ~= room then
      redis.call('ZADD', K.rooms, -room, replica.replica)
      replica.ranked = room
    end
  elseif replica.ranked ~= -1 then
    redis.call('ZREM', K.rooms, replica.replica)
    replica.ranked = -1
  end
  change_replica(replica)
end

local function hold(replica, ticket, placement, blocks, in_lane)
  hold_account(replica, ticket, placement, blocks, in_lane)
  pool.open = pool.open + 1
  rank_room(replica)
end

local function release(replica, ticket, placement, blocks, in_lane)
  release_account(replica, ticket, placement, blocks, in_lane)
  pool.open = pool.open - 1
  rank_room(replica)
end

local function report(replica, load)
  report_account(replica, load)
  rank_room(replica)
end

local function pause(replica)
  local rules = RULES.placement
  local is_again = pool.now_ms - replica.paused_until_ms < rules.decline_pause_max_ms
  local longer_ms = math.min(rules.decline_pause_max_ms, 2 * replica.pause_ms)
  replica.pause_ms = is_again and longer_ms or rules.decline_pause_ms
  replica.paused_until_ms = pool.now_ms + replica.pause_ms
  change_replica(replica)
end

-- Why no wait will help: "no_replica", "fits_never" or nil.
local function hopeless(blocks)
  if pool.replicas == 0 then
    local empty_ms = pool.now_ms - pool.empty_since_ms
    return empty_ms >= RULES.no_replica_ms and 'no_replica' or nil
  end
  return blocks > pool.largest and 'fits_never' or nil
end

-- Looking.

local function freest() return redis.call('ZRANGE', K.rooms, 0, RULES.placement.looks_max - 1) end

-- Names of those that have seen most of the prefix.
local function seers(matched)
  local numbers = {}
  for number in pairs(matched) do numbers[#numbers + 1] = number end
  if #numbers == 0 then return numbers end
  table.sort(numbers, function(a, b)
    if matched[a] ~= matched[b] then return matched[a] > matched[b] end
    return a < b
  end)
  for i = #numbers, RULES.placement.looks_max + 1, -1 do numbers[i] = nil end
  return redis.call('HMGET', K.lives, unpack(numbers))
end

local function looked_at(ticket, matched)
  if #ticket.exclude > 0 then return candidates(ticket.kv_blocks, ticket.exclude) end
  local found, names = {}, {}
  local function look(name)
    local replica = find_replica(name)
    names[name] = true
    if is_usable(replica) then found[#found + 1] = replica end
  end
  for _, name in ipairs(freest()) do
    if room_in(find_replica(name)) < ticket.kv_blocks then break end
    look(name)
  end
  for _, name in ipairs(seers(matched)) do
    if name and not names[name] then look(name) end
  end
  return found
end

local function fits(replica, blocks) return blocks <= room_in(replica) end

-- The best that `fit` says it fits on: `takes`, `lane_takes` or `fits`. `protected` is the number
-- of a replica that is kept for another ticket.
local function choose(ticket, fit, protected)
  local matched, able = prefix_matched(ticket.prefix_hashes), {}
  for _, replica in ipairs(looked_at(ticket, matched)) do
    if replica.number ~= protected and fit(replica, ticket.kv_blocks) then
      able[#able + 1] = replica
    end
  end
  return best_of(able, matched, #ticket.prefix_hashes)
end

-- The number of the freest replica, kept for a ticket that fits nowhere yet; 0 for none.
local function protect(ticket)
  if #ticket.exclude == 0 then
    for _, name in ipairs(freest()) do
      local replica = find_replica(name)
      if replica.total >= ticket.kv_blocks and is_usable(replica) then return replica.number end
    end
    return 0
  end
  local most
  for _, replica in ipairs(candidates(ticket.kv_blocks, ticket.exclude)) do
    local more = most and room_in(replica) - room_in(most) or 1
    if more > 0 or (more == 0 and replica.replica < most.replica) then most = replica end
  end
  return most and most.number or 0
end

-- Views.

-- A new life starts a new account; a view of an earlier life changes nothing.
local function see(view)
  local known = find_replica(view.replica)
  if known and contains(known.retired, view.boot_id) then return end
  if known and view.boot_id == known.boot_id then
    known.url, known.ready = view.url, view.ready
    known.total, known.sequences = view.kv_blocks, view.sequences
    known.seen_ms = pool.now_ms
    return rank_room(known)
  end
  local retired = {}
  if known then
    retired = known.retired
    retired[#retired + 1] = known.boot_id
    if #retired > RETIRED_BOOTS_MAX then table.remove(retired, 1) end
    forget_unreported(known.number)
    redis.call('HDEL', K.lives, known.number)
    pool.open = pool.open - known.open -- what its last life held went with it
  end
  pool.numbers = pool.numbers + 1
  local replica = {
    replica = view.replica, boot_id = view.boot_id, url = view.url, number = pool.numbers,
    ready = view.ready, total = view.kv_blocks, sequences = view.sequences,
    seen_ms = pool.now_ms, paused_until_ms = 0, pause_ms = 0, retired = retired,
    placed = known and known.placed or 0, report_seq = -1, reported = 0, reported_free = 0,
    open = 0, open_blocks = 0, lane_open = 0, lane_blocks = 0, unreported_blocks = 0,
  }
  redis.call('HSET', K.lives, replica.number, replica.replica)
  rank_room(replica)
end

-- Replicas as a gateway has them in view; those in nobody's view go when they are idle.
local function announce_all(views)
  for _, view in ipairs(views) do see(view) end
  pool.ready, pool.largest, pool.replicas = 0, 0, 0
  for _, replica in pairs(all_replicas()) do
    local silent_ms = pool.now_ms - replica.seen_ms
    if replica.open == 0 and silent_ms > RULES.placement.replica_silent_ms then
      delete_replica(replica)
    else
      pool.replicas = pool.replicas + 1
      pool.largest = math.max(pool.largest, replica.total)
      if is_present(replica) then pool.ready = pool.ready + 1 end
    end
  end
  if pool.replicas > 0 then
    pool.empty_since_ms = 0
  elseif pool.empty_since_ms == 0 then
    pool.empty_since_ms = pool.now_ms
  end
end
