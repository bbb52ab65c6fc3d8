-- Remember the newest version of each row that gateways decide from; a version never falls.
--
-- KEYS    1 versions  hash: "tenant", "key:<id>" of one tenant, or public model names
-- ARGV    pairs: field (text), version (integer)
-- RETURNS how many rose

register('raise_versions', function(keys, args)
  local raised = 0
  for i = 1, #args, 2 do
    local known = tonumber(redis.call('HGET', keys[1], args[i]) or 0)
    if tonumber(args[i + 1]) > known then
      redis.call('HSET', keys[1], args[i], args[i + 1])
      raised = raised + 1
    end
  end
  return raised
end)
