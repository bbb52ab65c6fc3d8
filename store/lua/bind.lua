-- The target that a conversation is bound to from now on: the one it was, or else the one drawn.
-- Twin: `core.bindings.Bindings`. BINDINGS holds its rules; the key's own expiry is the idle one.
--
-- KEYS    1 binding   string: the target's name
-- ARGV    1 drawn     target's name, for a conversation without a binding that may stay
--         2… allowed  names of the targets that may be kept
-- RETURNS the target's name

register('bind', function(keys, args)
  local standing = redis.call('GET', keys[1])
  local target = args[1]
  for i = 2, #args do
    if args[i] == standing then target = standing end
  end
  redis.call('SET', keys[1], target, 'PX', BINDINGS.idle_ms)
  return target
end)
