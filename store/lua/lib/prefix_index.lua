-- Which replicas have seen which prefix: the least recently used hash is forgotten first.
-- The twin of `core/prefix_index.py`. Used by the pool libraries and scripts.
--
-- KEYS    14 prefixes, 15 recency (see pool_state.lua)
-- RULES   prefix.hashes_max, prefix.owners_max
-- ARGV    none: the script hands over what it takes from them
-- RETURNS nothing: it defines local functions for the script that follows

local function read_owners(hashes)
  local asked = {}
  for _, name in ipairs(hashes) do
    if owners[name] == nil then asked[#asked + 1] = name end
  end
  if #asked == 0 then return end
  local found = redis.call('HMGET', K.prefixes, unpack(asked))
  for i, name in ipairs(asked) do
    local numbers = {}
    for number in string.gmatch(found[i] or '', '%d+') do numbers[#numbers + 1] = tonumber(number) end
    owners[name] = numbers
  end
end

-- For each replica number, how deep into the chain it has seen.
local function prefix_matched(hashes)
  read_owners(hashes)
  local matched = {}
  for depth, name in ipairs(hashes) do
    for _, number in ipairs(owners[name]) do matched[number] = depth end
  end
  return matched
end

-- The owners with this one as the latest.
local function with_owner(numbers, number)
  local latest = {}
  for _, other in ipairs(numbers) do
    if other ~= number then latest[#latest + 1] = other end
  end
  latest[#latest + 1] = number
  if #latest > RULES.prefix.owners_max then table.remove(latest, 1) end
  return latest
end

local function forget_prefixes(count)
  local forgotten = redis.call('ZPOPMIN', K.recency, count)
  for i = 1, #forgotten, 2 do
    redis.call('HDEL', K.prefixes, forgotten[i])
    owners[forgotten[i]] = nil
  end
end

-- This replica has the whole chain now.
local function prefix_record(hashes, number)
  if #hashes == 0 then return end
  read_owners(hashes)
  local fields, scores = {}, {}
  for _, name in ipairs(hashes) do
    if owners[name][#owners[name]] ~= number then
      owners[name] = with_owner(owners[name], number)
      fields[#fields + 1], fields[#fields + 2] = name, table.concat(owners[name], ',')
    end
    pool.touches = pool.touches + 1
    scores[#scores + 1], scores[#scores + 2] = pool.touches, name
  end
  if #fields > 0 then redis.call('HSET', K.prefixes, unpack(fields)) end
  if redis.call('ZADD', K.recency, unpack(scores)) > 0 then
    local excess = redis.call('ZCARD', K.recency) - RULES.prefix.hashes_max
    if excess > 0 then forget_prefixes(excess) end
  end
end
