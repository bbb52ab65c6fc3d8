-- Note new requests, and take so many retries from the fleet's budget, or none of them.
-- Twin: `core.retries.RetryBudget`. RETRIES holds its rules.
--
-- KEYS    1 budget    hash: start_ms of the window, and the counts of it and of the one before:
--                     requests, requests_before, retries, retries_before
-- ARGV    1 now_ms    ms, or "" for the server's clock (tests set it)
--         2 requests  integer, new ones since this gateway's last call
--         3 wanted    integer, retries asked for; 0 only notes the requests
-- RETURNS 1 if they were taken, else 0

local NAMES = {'start_ms', 'requests', 'requests_before', 'retries', 'retries_before'}

local function read_budget(key)
  local found, budget = redis.call('HMGET', key, unpack(NAMES)), {}
  for i, name in ipairs(NAMES) do budget[name] = tonumber(found[i] or 0) end
  return budget
end

local function move_budget(budget, now_ms)
  local spans = math.floor(math.max(0, now_ms - budget.start_ms) / RETRIES.window_ms)
  if spans == 0 then return end
  for _, name in ipairs({'requests', 'retries'}) do
    budget[name .. '_before'] = spans == 1 and budget[name] or 0
    budget[name] = 0
  end
  budget.start_ms = budget.start_ms + spans * RETRIES.window_ms
end

local function lately(budget, name, now_ms)
  local inside_ms = RETRIES.window_ms - math.max(0, now_ms - budget.start_ms)
  return budget[name] + math.floor(budget[name .. '_before'] * inside_ms / RETRIES.window_ms)
end

register('spend_retry', function(keys, args)
  local now_ms, wanted = time_ms(args[1]), tonumber(args[3])
  local budget = read_budget(keys[1])
  move_budget(budget, now_ms)
  budget.requests = budget.requests + tonumber(args[2])
  local share = math.floor(RETRIES.permille * lately(budget, 'requests', now_ms) / 1000)
  local taken = lately(budget, 'retries', now_ms) + wanted <= RETRIES.floor + share
  if taken then budget.retries = budget.retries + wanted end
  local fields = {}
  for _, name in ipairs(NAMES) do
    fields[#fields + 1] = name
    fields[#fields + 1] = string.format('%.0f', budget[name])
  end
  redis.call('HSET', keys[1], unpack(fields))
  redis.call('PEXPIRE', keys[1], 2 * RETRIES.window_ms)
  return taken and 1 or 0
end)
