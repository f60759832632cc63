-- ACCEPT: a request enters the system. Safe to run twice with the same id and body.
-- KEYS 1 state  2 waiting stream of its priority  3 ordinal  4 load  5 its API key's bucket  6 idempotency record
--      7 ids that its listener alone waits for  8 live requests by deadline (or none, in an older caller)
-- ARGV 1 id  2 body  3 ticket  4 digest of what must be equal for it to be the same request  5 seed (16 hex digits)
--      6 priority  7 key id  8 cost in tokens  9 reply channel or ''  10 time-out ms  11 retention ms
--      12 most requests of this priority waiting or running  13 most tokens of them  14 wake channel  15 prompt tokens
--      16 requests and 17 tokens per minute that the API key may have (0: no bound)
--      18 how long its idempotency key holds, ms (0: it has none)
-- Returns {'ok', id, ordinal, requests left, tokens left} | {'again', id, ordinal} (id and body, or the idempotency key
--         of an older id, are known) | {'conflict'} | {'full', what} | {'quota', what, ms to wait or -1 for ever}
local now, cost, keeps_ms = now_ms(), tonumber(ARGV[8]), tonumber(ARGV[18])

local function known_as(id, state_key)
  local f = redis.call('HMGET', state_key, 'digest', 'ordinal', 'status')
  if not f[1] then return nil end
  if f[1] ~= ARGV[4] then return {'conflict'} end
  return {'again', id, tonumber(f[2])}, f[3]
end

local function known_by_idempotency_key()
  local id = redis.call('GET', KEYS[6])
  if not id then return nil end
  local known, status = known_as(id, string.sub(KEYS[1], 1, #KEYS[1] - #ARGV[1]) .. id)
  if status == 'failed' or status == 'expired' or status == 'cancelled' then return nil end
  return known
end

local known = known_as(ARGV[1], KEYS[1]) or (keeps_ms > 0 and known_by_idempotency_key())
if known then return known end
local load = redis.call('HMGET', KEYS[4], 'requests:' .. ARGV[6], 'tokens:' .. ARGV[6])
if tonumber(load[1] or 0) + 1 > tonumber(ARGV[12]) then return {'full', 'requests'} end
if tonumber(load[2] or 0) + cost > tonumber(ARGV[13]) then return {'full', 'tokens'} end
local limited = tonumber(ARGV[16]) > 0 or tonumber(ARGV[17]) > 0
local left = limited and draw(KEYS[5], now, {requests = {1, tonumber(ARGV[16])}, tokens = {cost, tonumber(ARGV[17])}})
if left and left.refused then return {'quota', left.refused, left.wait_ms} end

local ordinal = redis.call('INCR', KEYS[3])
local deadline = now + tonumber(ARGV[10])
local entry = redis.call('XADD', KEYS[2], '*', 'id', ARGV[1], 'ordinal', ordinal, 'ticket', ARGV[3], 'accepted_ms', now,
  'deadline_ms', deadline, 'crashes', '0', 'committed', '0', 'priority', ARGV[6], 'cost', cost)
redis.call('HSET', KEYS[1], 'id', ARGV[1], 'body', ARGV[2], 'ticket', ARGV[3], 'digest', ARGV[4], 'seed', ARGV[5],
  'priority', ARGV[6], 'key_id', ARGV[7], 'cost', cost, 'prompt_tokens', ARGV[15], 'reply', ARGV[9],
  'retain_ms', ARGV[11], 'status', 'waiting', 'attempt', '0', 'crashes', '0', 'ordinal', ordinal, 'entry', entry,
  'stream', KEYS[2], 'accepted_ms', now, 'deadline_ms', deadline, 'bucket', limited and KEYS[5] or '')
-- A week more than it may run: whatever was off for so long, the former still finds it and ends it properly.
redis.call('PEXPIRE', KEYS[1], tonumber(ARGV[10]) + tonumber(ARGV[11]) + 604800000)
redis.call('HINCRBY', KEYS[4], 'requests:' .. ARGV[6], 1)
redis.call('HINCRBY', KEYS[4], 'tokens:' .. ARGV[6], cost)
if KEYS[8] then redis.call('ZADD', KEYS[8], deadline, ARGV[1]) end
if keeps_ms > 0 then
  redis.call('SET', KEYS[6], ARGV[1], 'PX', keeps_ms)
elseif ARGV[6] == 'interactive' and ARGV[9] ~= '' then
  redis.call('HSET', KEYS[1], 'listening', KEYS[7])
  redis.call('SADD', KEYS[7], ARGV[1])
  redis.call('PEXPIRE', KEYS[7], 1209600000)
end
redis.call('PUBLISH', ARGV[14], 'accept')
return {'ok', ARGV[1], ordinal, left and left.requests or -1, left and left.tokens or -1}
