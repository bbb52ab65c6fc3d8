-- What a request in these scopes would find, under these limits. Writes nothing.
-- Twin: `core.limits.look`.
--
-- KEYS    1 scopes, 2 held, 3 tickets, 4 idle (see lib/buckets.lua)
-- ARGV    1 now_ms    ms, or "" for the server's clock (tests set it)
--         2 … 6, 7 … 11, …  the scopes in order: name (text), requests_per_min,
--                     input_tokens_per_min, output_tokens_per_min, concurrency (integers, 0 is
--                     unlimited)
-- RETURNS msgpack array: for each scope limit, remaining, reset_ms of requests, input and output
--         tokens, and the number of tickets that count in it

local FIRST_SCOPE = 2

-- Of tickets that nobody touched for a lease, as the next call that writes will find.
local function uncount_lapsed()
  local gone = redis.call('ZRANGE', HELD, '-inf', now_ms, 'BYSCORE', 'LIMIT', 0, LIMITS.lapsed_max)
  if #gone == 0 then return end
  for _, packed in ipairs(redis.call('HMGET', TICKETS, unpack(gone))) do
    if packed then uncount(unpacked_held(packed)) end
  end
end

register('look', function(keys, args)
  begin_tenant(keys, args[1])
  uncount_lapsed()
  local told = {}
  for _, name in ipairs(read_scopes(args, FIRST_SCOPE)) do
    tell_room(told, opened[name])
    told[#told + 1] = opened[name].held
  end
  return cmsgpack.pack(told)
end)
