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
local SHARES = {standard = RULES.queue.share_standard, batch = RULES.queue.share_batch}

local function counter_of(tenant)
  return tonumber(redis.call('ZSCORE', K.counters, tenant) or pool.base)
end

local function set_counter(tenant, counter)
  redis.call('ZADD', K.counters, counter, tenant)
  for _, name in ipairs(CLASSES) do
    if pool.counts[name] > 0 then redis.call('ZADD', K.waiting[name], 'XX', counter, tenant) end
  end
  if redis.call('ZCARD', K.counters) > RULES.queue.tenants_max then
    pool.base = math.max(pool.base, tonumber(redis.call('ZPOPMIN', K.counters)[2]))
  end
end

local function charge_counter(tenant, cost)
  if cost ~= 0 then set_counter(tenant, math.max(0, counter_of(tenant) + cost)) end
end

local function cost_of(input_tokens, output_tokens, weight)
  return math.floor((input_tokens + OUTPUT_TOKEN_COST * output_tokens) * COST_UNITS / weight)
end

local function waiting_count()
  return pool.counts.interactive + pool.counts.standard + pool.counts.batch
end

-- Tickets waiting in this class and above.
local function position_in(class)
  local ahead = 0
  for rank = 1, RANKS[class] do ahead = ahead + pool.counts[CLASSES[rank]] end
  return ahead
end

-- Lifts the counter of a tenant that was not waiting, so that idling saves nothing up.
local function enter_class(class, tenant)
  local waiting = redis.call('ZRANGE', K.waiting[class], 0, 0, 'WITHSCORES')
  local lowest = waiting[2] and tonumber(waiting[2]) or pool.floors[class]
  if counter_of(tenant) < lowest then set_counter(tenant, lowest) end
end

local function leave_class(class, tenant)
  pool.floors[class] = math.max(pool.floors[class], counter_of(tenant))
end

local function lane(class, tenant) return class .. '|' .. tenant end

local function fifo_member(ticket)
  return lane(ticket.service_class, ticket.tenant) .. '|' .. ticket.order .. '|' .. ticket.ticket
end

-- Joins behind the tenant's own tickets of that class, or comes back before them.
local function push_ticket(ticket, at_head)
  local class, tenant = ticket.service_class, ticket.tenant
  if not redis.call('ZSCORE', K.waiting[class], tenant) then
    enter_class(class, tenant)
    redis.call('ZADD', K.waiting[class], counter_of(tenant), tenant)
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
  pool.counts[class] = pool.counts[class] + 1
end

-- Leaves, from wherever in the queue.
local function remove_ticket(ticket)
  local class, tenant = ticket.service_class, ticket.tenant
  redis.call('ZREM', K.fifo, fifo_member(ticket))
  pool.counts[class] = pool.counts[class] - 1
  if #beginning(K.fifo, lane(class, tenant), 1) == 0 then
    redis.call('ZREM', K.waiting[class], tenant)
    leave_class(class, tenant)
  end
  if pool.counts[class] == 0 then pool.credits[class] = math.min(0, pool.credits[class]) end
end

local function is_owed(class)
  local count = pool.counts[class]
  return count > 0 and position_in(class) > count and pool.credits[class] >= SHARE_ONE
end

-- The first ticket of the first tenant not yet tried, of this class; nil for none.
local function first_of(class, skipped, skipped_count)
  if pool.counts[class] == 0 then return nil end
  for _, tenant in ipairs(redis.call('ZRANGE', K.waiting[class], 0, skipped_count)) do
    if not skipped[lane(class, tenant)] then
      local member = beginning(K.fifo, lane(class, tenant), 1)[1]
      return string.sub(member, #lane(class, tenant) + ORDER_LENGTH + 1)
    end
  end
  return nil
end

-- Next by owed share, then by rank: a ticket's name, and whether it is its class's share.
local function head_of_queue(skipped, skipped_count)
  for rank = 2, #CLASSES do
    if is_owed(CLASSES[rank]) then
      local name = first_of(CLASSES[rank], skipped, skipped_count)
      if name then return name, true end
    end
  end
  for _, class in ipairs(CLASSES) do
    local name = first_of(class, skipped, skipped_count)
    if name then return name, false end
  end
  return nil, false
end

-- Accounts a ticket's KV blocks to the shares of the classes below it, or to its own.
local function count_share(class, blocks, owed)
  if owed then pool.credits[class] = pool.credits[class] - SHARE_ONE * blocks end
  local most = SHARE_ONE * RULES.queue.credit_blocks_max
  for rank = RANKS[class] + 1, #CLASSES do
    local name = CLASSES[rank]
    if pool.counts[name] > 0 then
      pool.credits[name] = math.min(most, pool.credits[name] + SHARES[name] * blocks)
    end
  end
end
