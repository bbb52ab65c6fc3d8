-- The engine's last word on a ticket: free its account, true up its tenant's counter, place
-- the next. Twin: `core.dispatch.Pool.finish`.
--
-- KEYS    a pool's 18 keys (see lib/pool_state.lua)
-- ARGV    1 now_ms         ms, or "" for the server's clock (tests set it)
--         2 pool           text, told to gateways that are woken
--         3 gateway        text, the incarnation that asks
--         4 ticket         text
--         5 input_tokens   integer, read and not from the prefix cache
--         6 output_tokens  integer, produced in all
--         7 prefix_hashes  msgpack array of text: what its replica has cached now
-- RETURNS msgpack array: epoch, grants of the caller, each {ticket, outcome} as of `arm`

register('finish_pool', function(keys, args)
  begin(keys, args[1])
  local ticket = find_ticket(args[4])
  if ticket then
    if ticket.number > 0 then
      prefix_record(cmsgpack.unpack(args[7]), ticket.number)
      measure_stay(ticket)
    end
    charge_ticket(ticket, tonumber(args[5]), tonumber(args[6]))
    forget(ticket)
  end
  dispatch('')
  local reply = cmsgpack.pack({pool.epoch, grants_for(args[3])})
  close_pool(args[3], args[2])
  return reply
end)
