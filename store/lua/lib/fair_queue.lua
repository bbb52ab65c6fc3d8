-- Who waits, and who is next: classes by rank and share, tenants by virtual token counter.
-- The twin of `core/fair_queue.py`, function by function. Used by the pool scripts.
--
-- KEYS    9 fifo, 10 to 12 waiting tenants by class, 13 counters (see pool_state.lua)
-- RULES   queue.*
-- ARGV    none: the script hands over what it takes from them
-- RETURNS nothing: it defines local functions for the script that follows

local COST_UNITS, OUTPUT_TOKEN_COST, SHARE_ONE = 1000, 2, 1000
local ORDER_ZERO = 2 ^ 51 -- so that orders before the first are not negative
local ORDER_LENGTH = 18 -- 16 digits between two bars
local SHARES = {0, RULES.queue.share_standard, RULES.queue.share_batch} -- by rank

local function counter_of(tenant)
  if not counters[tenant] then
    counters[tenant] = tonumber(redis.call('ZSCORE', K.counters, tenant) or pool.base)
  end
  return counters[tenant]
end

local function set_counter(tenant, counter)
  counters[tenant] = counter
  for rank = 1, #CLASSES do
    if pool.counts[rank] > 0 then
      redis.call('ZADD', K.waiting[rank], 'XX', counter, tenant)
    end
  end
  if redis.call('ZADD', K.counters, counter, tenant) == 0 then return end
  if redis.call('ZCARD', K.counters) > RULES.queue.tenants_max then
    local forgotten = redis.call('ZPOPMIN', K.counters)
    pool.base = math.max(pool.base, tonumber(forgotten[2]))
    counters = {} -- whoever is not remembered starts from the base
  end
end

local function charge_counter(tenant, cost)
  if cost ~= 0 then set_counter(tenant, math.max(0, counter_of(tenant) + cost)) end
end

local function cost_of(input_tokens, output_tokens, weight)
  return math.floor((input_tokens + OUTPUT_TOKEN_COST * output_tokens) * COST_UNITS / weight)
end

local function waiting_count() return pool.counts[1] + pool.counts[2] + pool.counts[3] end

-- Tickets waiting in this class and above.
local function position_in(rank)
  local ahead = 0
  for i = 1, rank do ahead = ahead + pool.counts[i] end
  return ahead
end

-- Lifts the counter of a tenant that was not waiting, so that idling saves nothing up.
local function enter_class(rank, tenant)
  local lowest = pool.floors[rank]
  if pool.counts[rank] > 0 then
    lowest = tonumber(redis.call('ZRANGE', K.waiting[rank], 0, 0, 'WITHSCORES')[2])
  end
  if counter_of(tenant) < lowest then set_counter(tenant, lowest) end
end

local function leave_class(rank, tenant)
  pool.floors[rank] = math.max(pool.floors[rank], counter_of(tenant))
end

local function lane(class, tenant) return class .. '|' .. tenant end

-- The tenant's tickets waiting in this class.
local function waiting_of(rank, tenant)
  local name = lane(CLASSES[rank], tenant)
  return redis.call('ZLEXCOUNT', K.fifo, '[' .. name .. '|', '(' .. name .. '}')
end

local function tenants_in(rank) return redis.call('ZCARD', K.waiting[rank]) end

-- Tickets served, at most, up to and with the tenant's last one, or one more that would join.
local function place_in(rank, tenant, joined)
  local own = waiting_of(rank, tenant)
  local others = tenants_in(rank) - (own > 0 and 1 or 0)
  local before = own - joined
  local ahead = position_in(rank) - pool.counts[rank]
  return ahead + math.min(pool.counts[rank] - joined, before + others * (before + 1)) + 1
end

local function fifo_member(ticket)
  return lane(ticket.service_class, ticket.tenant) .. '|' .. ticket.order .. '|' .. ticket.ticket
end

-- Joins behind the tenant's own tickets of that class, or comes back before them.
local function push_ticket(ticket, at_head)
  local rank, tenant = RANKS[ticket.service_class], ticket.tenant
  if not redis.call('ZSCORE', K.waiting[rank], tenant) then
    enter_class(rank, tenant)
    redis.call('ZADD', K.waiting[rank], counter_of(tenant), tenant)
  end
  local order
  if at_head then
    pool.first_order = pool.first_order - 1
    order = pool.first_order
  else
    pool.last_order = pool.last_order + 1
    order = pool.last_order
  end
  ticket.order = string.format('%016.0f', ORDER_ZERO + order)
  redis.call('ZADD', K.fifo, 0, fifo_member(ticket))
  pool.counts[rank] = pool.counts[rank] + 1
end

-- Leaves, from wherever in the queue.
local function remove_ticket(ticket)
  local rank, tenant = RANKS[ticket.service_class], ticket.tenant
  redis.call('ZREM', K.fifo, fifo_member(ticket))
  pool.counts[rank] = pool.counts[rank] - 1
  if #beginning(K.fifo, lane(ticket.service_class, tenant), 1) == 0 then
    redis.call('ZREM', K.waiting[rank], tenant)
    leave_class(rank, tenant)
  end
  if pool.counts[rank] == 0 then pool.credits[rank] = math.min(0, pool.credits[rank]) end
end

local function is_owed(rank)
  local count = pool.counts[rank]
  return count > 0 and position_in(rank) > count and pool.credits[rank] >= SHARE_ONE
end

-- The first ticket of the first tenant not yet tried, of this class; nil for none.
local function first_of(rank, skipped, skipped_count)
  if pool.counts[rank] == 0 then return nil end
  for _, tenant in ipairs(redis.call('ZRANGE', K.waiting[rank], 0, skipped_count)) do
    local name = lane(CLASSES[rank], tenant)
    if not skipped[name] then
      return string.sub(beginning(K.fifo, name, 1)[1], #name + ORDER_LENGTH + 1)
    end
  end
  return nil
end

-- Next by owed share, then by rank: a ticket's name, and whether it is its class's share.
local function head_of_queue(skipped, skipped_count)
  for rank = 2, #CLASSES do
    if is_owed(rank) then
      local name = first_of(rank, skipped, skipped_count)
      if name then return name, true end
    end
  end
  for rank = 1, #CLASSES do
    local name = first_of(rank, skipped, skipped_count)
    if name then return name, false end
  end
  return nil, false
end

-- Accounts a ticket's KV blocks to the shares of the classes below it, or to its own.
local function count_share(rank, blocks, owed)
  if owed then pool.credits[rank] = pool.credits[rank] - SHARE_ONE * blocks end
  local most = SHARE_ONE * RULES.queue.credit_blocks_max
  for lower = rank + 1, #CLASSES do
    if pool.counts[lower] > 0 then
      pool.credits[lower] = math.min(most, pool.credits[lower] + SHARES[lower] * blocks)
    end
  end
end
