-- A replica's account and what speaks for it.
-- The twin of `core/placement.py`, function by function. Used by the pool scripts.
--
-- KEYS    2 replicas, 8 unreported (see pool_state.lua)
-- RULES   placement.*
-- ARGV    none: the script hands over what it takes from them
-- RETURNS nothing: it defines local functions for the script that follows

local SCORE_ONE = 1000000
local RETIRED_BOOTS_MAX = 4

local function contains(list, value)
  for _, item in ipairs(list) do
    if item == value then return true end
  end
  return false
end

local function free_blocks(replica)
  if replica.open == 0 then return replica.total end
  local after_report = replica.reported_free - replica.unreported_blocks
  return math.max(0, math.min(after_report, replica.total - replica.open_blocks))
end

-- The largest ticket that fits; 0 without a free slot.
local function room_in(replica)
  local has_slot = replica.sequences == 0 or replica.open < replica.sequences
  return has_slot and free_blocks(replica) or 0
end

local function has_lane(replica)
  return replica.sequences == 0 or replica.sequences >= RULES.placement.lane_slots_from
end

local function lane_size(replica)
  return math.floor(replica.total * RULES.placement.lane_percent / 100)
end

-- Whether one more ticket fits beside the lane. With nothing open there is none to keep.
local function takes(replica, blocks)
  if replica.open == 0 or not has_lane(replica) then return blocks <= room_in(replica) end
  if replica.sequences > 0 and replica.open - replica.lane_open >= replica.sequences - 1 then
    return false
  end
  return blocks + math.max(0, lane_size(replica) - replica.lane_blocks) <= room_in(replica)
end

-- Whether one more ticket fits into the lane: by its slot, or by blocks without slots.
local function lane_takes(replica, blocks)
  if not has_lane(replica) or blocks > room_in(replica) then return false end
  if replica.sequences > 0 then return replica.lane_open == 0 end
  return replica.lane_blocks + blocks <= lane_size(replica)
end

-- Whether a prefix it has seen speaks for it: not while it has more than its load.
local function holds_affinity(replica)
  local rules = RULES.placement
  if replica.open < rules.affinity_floor then return true end
  return 100 * (replica.open + 1) * pool.ready <= rules.affinity_percent * (pool.open + 1)
end

local function is_present(replica)
  return replica.ready and pool.now_ms - replica.seen_ms <= RULES.placement.replica_silent_ms
end

local function is_usable(replica)
  return is_present(replica) and pool.now_ms >= replica.paused_until_ms
end

-- Replicas that could ever hold it. Excluded ones come back when there are no others.
local function candidates(blocks, exclude)
  local able, wanted = {}, {}
  for _, replica in pairs(all_replicas()) do
    if is_present(replica) and replica.total >= blocks then
      able[#able + 1] = replica
      if not contains(exclude, replica.replica) then wanted[#wanted + 1] = replica end
    end
  end
  local usable = {}
  for _, replica in ipairs(#wanted > 0 and wanted or able) do
    if pool.now_ms >= replica.paused_until_ms then usable[#usable + 1] = replica end
  end
  return usable
end

local function idleness(replica)
  if replica.sequences == 0 then return math.floor(SCORE_ONE / (1 + replica.open)) end
  local slots = math.max(0, replica.sequences - replica.open)
  return math.floor(slots * SCORE_ONE / replica.sequences)
end

local function score(replica, matched, hash_count)
  local rules = RULES.placement
  local cached = hash_count > 0 and math.floor(matched * SCORE_ONE / hash_count) or 0
  local free = replica.total > 0 and math.floor(free_blocks(replica) * SCORE_ONE / replica.total)
    or 0
  local weighted = rules.weight_prefix * cached + rules.weight_free * free
    + rules.weight_load * idleness(replica)
  return math.floor(weighted / (rules.weight_prefix + rules.weight_free + rules.weight_load))
end

-- The best score, then the fewest tickets, then the first name.
local function best_of(able, matched, hash_count)
  local best, best_score
  for _, replica in ipairs(able) do
    local loyal = holds_affinity(replica) and matched[replica.number] or 0
    local found = score(replica, loyal, hash_count)
    local better = best == nil or found > best_score
    if best and found == best_score then
      better = replica.open < best.open
        or (replica.open == best.open and replica.replica < best.replica)
    end
    if better then best, best_score = replica, found end
  end
  return best
end

local function unreported_member(number, placement, blocks, ticket)
  return string.format('%012.0f|%016.0f|%.0f|%s', number, placement, blocks, ticket)
end

local function hold_account(replica, ticket, placement, blocks, in_lane)
  replica.placed = math.max(replica.placed, placement)
  if replica.open == 0 then replica.reported_free = replica.total end
  replica.open = replica.open + 1
  replica.open_blocks = replica.open_blocks + blocks
  if in_lane then
    replica.lane_open = replica.lane_open + 1
    replica.lane_blocks = replica.lane_blocks + blocks
  end
  if placement > replica.reported then
    redis.call('ZADD', K.unreported, 0,
      unreported_member(replica.number, placement, blocks, ticket))
    replica.unreported_blocks = replica.unreported_blocks + blocks
  end
  change_replica(replica)
end

local function release_account(replica, ticket, placement, blocks, in_lane)
  replica.open = replica.open - 1
  replica.open_blocks = replica.open_blocks - blocks
  if in_lane then
    replica.lane_open = replica.lane_open - 1
    replica.lane_blocks = replica.lane_blocks - blocks
  end
  local member = unreported_member(replica.number, placement, blocks, ticket)
  if redis.call('ZREM', K.unreported, member) == 1 then
    replica.unreported_blocks = replica.unreported_blocks - blocks
  else
    replica.reported_free = math.min(replica.total, replica.reported_free + blocks)
  end
  change_replica(replica)
end

-- Takes an absolute report, unless it is of another life or older than the last one.
local function report_account(replica, load)
  if load.boot_id ~= replica.boot_id or load.seq <= replica.report_seq then return end
  replica.report_seq = load.seq
  replica.reported = math.max(replica.reported, load.placed_seq)
  replica.reported_free = math.min(replica.total, load.kv_blocks_free)
  local life = string.format('%012.0f', replica.number)
  local told = redis.call('ZRANGE', K.unreported, '[' .. life .. '|',
    string.format('(%s|%016.0f}', life, replica.reported), 'BYLEX')
  for _, member in ipairs(told) do
    replica.unreported_blocks = replica.unreported_blocks
      - tonumber(string.match(member, '^%d+|%d+|(%d+)|'))
    redis.call('ZREM', K.unreported, member)
  end
  change_replica(replica)
end

local function forget_unreported(number)
  local life = string.format('%012.0f', number)
  redis.call('ZREMRANGEBYLEX', K.unreported, '[' .. life .. '|', '(' .. life .. '}')
end
