-- Forget a ticket as if it had never been, and place the next. Repeating it is harmless; a
-- ticket that nobody knows makes it a sweep. Twin: `core.dispatch.Pool.cancel`.
--
-- KEYS    a pool's 18 keys (see lib/pool_state.lua)
-- ARGV    1 now_ms   ms, or "" for the server's clock (tests set it)
--         2 pool     text, told to gateways that are woken
--         3 gateway  text, the incarnation that asks
--         4 ticket   text
-- RETURNS msgpack array: epoch, grants of the caller, each {ticket, outcome} as of `arm`

register('cancel_pool', function(keys, args)
  begin(keys, args[1])
  local ticket = find_ticket(args[4])
  if ticket then
    refund_ticket(ticket)
    forget(ticket)
  end
  dispatch('')
  local reply = cmsgpack.pack({pool.epoch, grants_for(args[3])})
  close_pool(args[3], args[2])
  return reply
end)
