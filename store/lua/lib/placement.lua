-- A replica's account and the choice of one for a request.
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

local function fits(replica, blocks)
  local has_slot = replica.sequences == 0 or replica.open < replica.sequences
  return has_slot and blocks <= free_blocks(replica)
end

-- Replicas that could ever hold it. Excluded ones come back when there are no others.
local function candidates(blocks, exclude)
  local able, wanted = {}, {}
  for _, replica in pairs(all_replicas()) do
    local silent_ms = pool.now_ms - replica.seen_ms
    local present = replica.ready and silent_ms <= RULES.placement.replica_silent_ms
    if present and replica.total >= blocks then
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
local function choose(able, blocks, hashes, protected)
  local matched, best, best_score = prefix_matched(hashes), nil, nil
  for _, replica in ipairs(able) do
    if replica.number ~= protected and fits(replica, blocks) then
      local found = score(replica, matched[replica.number] or 0, #hashes)
      local better = best == nil or found > best_score
      if best and found == best_score then
        better = replica.open < best.open
          or (replica.open == best.open and replica.replica < best.replica)
      end
      if better then best, best_score = replica, found end
    end
  end
  return best
end

-- The number of the freest replica, kept for a ticket that fits nowhere yet; 0 for none.
local function protect(able)
  local freest
  for _, replica in ipairs(able) do
    local more = freest and free_blocks(replica) - free_blocks(freest) or 1
    if more > 0 or (more == 0 and replica.replica < freest.replica) then freest = replica end
  end
  return freest and freest.number or 0
end

local function unreported_member(number, placement, blocks, ticket)
  return string.format('%012.0f|%016.0f|%.0f|%s', number, placement, blocks, ticket)
end

local function hold(replica, ticket, placement, blocks)
  replica.placed = math.max(replica.placed, placement)
  if replica.open == 0 then replica.reported_free = replica.total end
  replica.open = replica.open + 1
  replica.open_blocks = replica.open_blocks + blocks
  if placement > replica.reported then
    redis.call('ZADD', K.unreported, 0,
      unreported_member(replica.number, placement, blocks, ticket))
    replica.unreported_blocks = replica.unreported_blocks + blocks
  end
  change_replica(replica)
end

local function release(replica, ticket, placement, blocks)
  replica.open = replica.open - 1
  replica.open_blocks = replica.open_blocks - blocks
  local member = unreported_member(replica.number, placement, blocks, ticket)
  if redis.call('ZREM', K.unreported, member) == 1 then
    replica.unreported_blocks = replica.unreported_blocks - blocks
  else
    replica.reported_free = math.min(replica.total, replica.reported_free + blocks)
  end
  change_replica(replica)
end

-- Takes an absolute report, unless it is of another life or older than the last one.
local function report(replica, load)
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

-- A new life starts a new account; a view of an earlier life changes nothing.
local function announce(view)
  local known = find_replica(view.replica)
  if known and contains(known.retired, view.boot_id) then return end
  if known and view.boot_id == known.boot_id then
    known.url, known.ready = view.url, view.ready
    known.total, known.sequences = view.kv_blocks, view.sequences
    known.seen_ms = pool.now_ms
    change_replica(known)
    return
  end
  local retired = {}
  if known then
    retired = known.retired
    retired[#retired + 1] = known.boot_id
    if #retired > RETIRED_BOOTS_MAX then table.remove(retired, 1) end
    forget_unreported(known.number)
  end
  pool.numbers = pool.numbers + 1
  local replica = {
    replica = view.replica, boot_id = view.boot_id, url = view.url, number = pool.numbers,
    ready = view.ready, total = view.kv_blocks, sequences = view.sequences,
    seen_ms = pool.now_ms, paused_until_ms = 0, retired = retired,
    placed = known and known.placed or 0, report_seq = -1, reported = 0, reported_free = 0,
    open = 0, open_blocks = 0, unreported_blocks = 0,
  }
  change_replica(replica)
end
