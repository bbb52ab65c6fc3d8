-- What the functions about deaths do first.
--
-- KEYS    1 suspects, 2 until (see record_death.lua)
-- ARGV    none
-- RETURNS nothing: it defines a local function for the functions that follow

local function forget_deaths(keys, now_ms)
  local over = redis.call('ZRANGEBYSCORE', keys[2], '-inf', now_ms)
  for _, fingerprint in ipairs(over) do
    redis.call('HDEL', keys[1], fingerprint)
    redis.call('ZREM', keys[2], fingerprint)
  end
end
