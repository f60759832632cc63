-- FORM: a cohort goes to one worker. The fence is that deleting the waiting entry returned 1.
-- KEYS 1 worker record  2 its job stream  3 its rows  4 rows by API key  5 waiting interactive  6 waiting offline
--      7 waiting returned  8... state of each request
-- ARGV 1 worker id  2 cohort id  3 most rows per API key, for requests that have one (0: no bound)  4 lowest wire version that reads the job
--      5 '' or the age in ms below which offline rows give way: interactive requests may then take their places
--      6... request ids, in the order of KEYS 8...
-- Returns the ids that were sent; those missing were taken, cancelled, expired, or did not fit.
local worker = redis.call('HMGET', KEYS[1], 'accepting', 'free', 'free_tokens', 'dead', 'held')
if worker[1] ~= '1' or worker[4] then return {} end
local free, slots = tonumber(worker[2]), tonumber(worker[3] or -1)
local now, key_bound = now_ms(), tonumber(ARGV[3])
local sent, seats = {}, {}

-- Offline rows that the worker can pause: those that have not aged, but for as many as it says it leaves alone.
local function giving_way()
  if ARGV[5] == '' or not worker[5] then return 0 end
  local prefix, count = string.sub(KEYS[8], 1, #KEYS[8] - #ARGV[6]), -tonumber(worker[5])
  for _, id in ipairs(redis.call('HKEYS', KEYS[3])) do
    local f = redis.call('HMGET', prefix .. id, 'priority', 'accepted_ms')
    if f[1] == 'offline' and tonumber(f[2]) > now - tonumber(ARGV[5]) then count = count + 1 end
  end
  return math.max(count, 0)
end

local function try(id, state_key)
  local f = redis.call('HMGET', state_key, 'status', 'cancel', 'deadline_ms', 'cost', 'key_id', 'stream', 'entry', 'priority')
  if f[1] ~= 'waiting' or f[2] or tonumber(f[3]) <= now then return end
  if free <= 0 and f[8] ~= 'interactive' then return end
  local cost = tonumber(f[4])
  if slots >= 0 and cost > slots then return end
  if key_bound > 0 and f[5] ~= '' and tonumber(redis.call('HGET', KEYS[4], f[5]) or 0) >= key_bound then return end
  if redis.call('XDEL', f[6], f[7]) ~= 1 then return end
  local attempt = redis.call('HINCRBY', state_key, 'attempt', 1)
  redis.call('HSET', state_key, 'status', 'running', 'owner', ARGV[1], 'cohort', ARGV[2], 'formed_ms', now)
  redis.call('HINCRBY', KEYS[4], f[5], 1)
  redis.call('HSET', KEYS[3], id, attempt)
  free = free - 1
  if slots >= 0 then slots = slots - cost end
  sent[#sent + 1] = id
  seats[#seats + 1] = id .. ' ' .. attempt
end

local least = -giving_way()
for i = 6, #ARGV do
  if free <= least then break end
  try(ARGV[i], KEYS[i + 2])
end
if #sent == 0 then return sent end
redis.call('HSET', KEYS[1], 'free', free)
if slots >= 0 then redis.call('HSET', KEYS[1], 'free_tokens', slots) end
redis.call('XADD', KEYS[2], '*', 'cohort', ARGV[2], 'wire', ARGV[4], 'formed_ms', now, 'seats', table.concat(seats, ' '))
local ttl = redis.call('PTTL', KEYS[1])
if ttl > 0 then
  redis.call('PEXPIRE', KEYS[2], ttl)
  redis.call('PEXPIRE', KEYS[3], ttl)
end
return sent
