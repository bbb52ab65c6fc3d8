-- A request of this fingerprint has been answered: it is no suspect, unless it is refused by now.
-- Twin: `core.deaths.Deaths.absolve`.
--
-- KEYS    1 suspects, 2 until (see record_death.lua)
-- ARGV    1 now_ms       unused, as every function has it
--         2 fingerprint  text
-- RETURNS 1 if it was a suspect and is none any more, else 0

register('absolve_death', function(keys, args)
  local packed = redis.call('HGET', keys[1], args[2])
  if not packed or #cmsgpack.unpack(packed) >= DEATHS.deaths then return 0 end
  redis.call('HDEL', keys[1], args[2])
  redis.call('ZREM', keys[2], args[2])
  return 1
end)
