-- A life of a replica ended under a request of this fingerprint.
-- Twin: `core.deaths.Deaths.record`. DEATHS holds its rules.
--
-- KEYS    1 suspects     hash: fingerprint -> msgpack array of boot ids
--         2 until        sorted set: fingerprint by when it is forgotten, in Unix ms
-- ARGV    1 now_ms       ms, or "" for the server's clock (tests set it)
--         2 fingerprint  text, of a request: a keyed hash
--         3 boot_id      text, the life that ended
-- RETURNS how many lives have ended under it, as far as counted

register('record_death', function(keys, args)
  local now_ms, fingerprint, boot_id = time_ms(args[1]), args[2], args[3]
  forget_deaths(keys, now_ms)
  local packed = redis.call('HGET', keys[1], fingerprint)
  if not packed and redis.call('ZCARD', keys[2]) >= DEATHS.kept_max then
    redis.call('HDEL', keys[1], redis.call('ZPOPMIN', keys[2])[1])
  end
  local boots = packed and cmsgpack.unpack(packed) or {}
  for _, known in ipairs(boots) do
    if known == boot_id then return #boots end
  end
  boots[#boots + 1] = boot_id
  if #boots > DEATHS.deaths then table.remove(boots, 1) end
  redis.call('HSET', keys[1], fingerprint, cmsgpack.pack(boots))
  redis.call('ZADD', keys[2], 'GT', now_ms + DEATHS.refuse_ms, fingerprint)
  for _, key in ipairs(keys) do redis.call('PEXPIRE', key, DEATHS.refuse_ms) end
  return #boots
end)
