-- The time of this call in Unix milliseconds: the server's, unless a test gives one.
-- Whoever keeps a last time clamps it, so that time never goes back.
--
-- KEYS    none
-- ARGV    now_ms is the first of every script: "" for the server's clock
-- RETURNS nothing: it defines a local function for the libraries that follow

local function time_ms(now_arg)
  if now_arg ~= '' then return tonumber(now_arg) end
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
