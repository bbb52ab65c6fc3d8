-- Which replicas have seen which prefix: the least recently used hash is forgotten first.
-- The twin of `core/prefix_index.py`. Used by the pool libraries and scripts.
--
-- KEYS    14 prefixes, 15 recency (see pool_state.lua)
-- RULES   prefix.hashes_max, prefix.owners_max
-- ARGV    none: the script hands over what it takes from them
-- RETURNS nothing: it defines local functions for the script that follows

local known_owners = {} -- of this call, by hash

local function owners_of(hashes)
  local asked = {}
  for _, name in ipairs(hashes) do
    if known_owners[name] == nil then asked[#asked + 1] = name end
  end
  if #asked == 0 then return end
  local found = redis.call('HMGET', K.prefixes, unpack(asked))
  for i, name in ipairs(asked) do
    local owners = {}
    for number in string.gmatch(found[i] or '', '%d+') do owners[#owners + 1] = tonumber(number) end
    known_owners[name] = owners
  end
end

-- For each replica number, how deep into the chain it has seen.
local function prefix_matched(hashes)
  owners_of(hashes)
  local matched = {}
  for depth, name in ipairs(hashes) do
    for _, number in ipairs(known_owners[name]) do matched[number] = depth end
  end
  return matched
end

-- This replica has the whole chain now.
local function prefix_record(hashes, number)
  if #hashes == 0 then return end
  owners_of(hashes)
  local fields, scores = {}, {}
  for _, name in ipairs(hashes) do
    local owners = {}
    for _, other in ipairs(known_owners[name]) do
      if other ~= number then owners[#owners + 1] = other end
    end
    owners[#owners + 1] = number
    if #owners > RULES.prefix.owners_max then table.remove(owners, 1) end
    known_owners[name] = owners
    pool.touches = pool.touches + 1
    fields[#fields + 1], fields[#fields + 2] = name, table.concat(owners, ',')
    scores[#scores + 1], scores[#scores + 2] = pool.touches, name
  end
  redis.call('HSET', K.prefixes, unpack(fields))
  redis.call('ZADD', K.recency, unpack(scores))
  local excess = redis.call('ZCARD', K.recency) - RULES.prefix.hashes_max
  if excess > 0 then
    local forgotten = redis.call('ZPOPMIN', K.recency, excess)
    for i = 1, #forgotten, 2 do
      redis.call('HDEL', K.prefixes, forgotten[i])
      known_owners[forgotten[i]] = nil
    end
  end
end
