-- Remember the newest version of each row that gateways decide from; a version never falls.
--
-- KEYS    1 versions  hash: "tenant", "key:<id>" of one tenant, or public model names
-- ARGV    pairs: field (text), version (integer)
-- RETURNS how many rose

local raised = 0
for i = 1, #ARGV, 2 do
  local known = tonumber(redis.call('HGET', KEYS[1], ARGV[i]) or 0)
  if tonumber(ARGV[i + 1]) > known then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
    raised = raised + 1
  end
end
return raised
