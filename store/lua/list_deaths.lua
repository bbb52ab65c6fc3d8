-- Every suspect, the first to be forgotten first. Twin: `core.deaths.Deaths.listed`.
--
-- KEYS    1 suspects, 2 until (see record_death.lua)
-- ARGV    1 now_ms  ms, or "" for the server's clock (tests set it)
-- RETURNS msgpack array of {fingerprint, deaths, ms until it is forgotten}

register('list_deaths', function(keys, args)
  local now_ms, listed = time_ms(args[1]), {}
  forget_deaths(keys, now_ms)
  local found = redis.call('ZRANGE', keys[2], 0, -1, 'WITHSCORES')
  for i = 1, #found, 2 do
    local boots = cmsgpack.unpack(redis.call('HGET', keys[1], found[i]))
    listed[#listed + 1] = {found[i], #boots, tonumber(found[i + 1]) - now_ms}
  end
  return cmsgpack.pack(listed)
end)
