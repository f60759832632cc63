-- ACCEPT: a request enters the system. Safe to run twice with the same id and body.
-- KEYS 1 state  2 waiting stream of its priority  3 ordinal  4 load
-- ARGV 1 id  2 body  3 ticket  4 digest of body and seed  5 seed (16 hex digits)  6 priority  7 key id  8 cost in tokens
--      9 reply channel or ''  10 time-out ms  11 retention ms  12 most requests waiting or running of this priority
--      13 most tokens of them  14 wake channel
-- Returns {'ok', ordinal} | {'again', ordinal} | {'conflict'} | {'full', 'requests' | 'tokens'}
local known = redis.call('HMGET', KEYS[1], 'digest', 'ordinal')
if known[1] then
  if known[1] == ARGV[4] then return {'again', tonumber(known[2])} end
  return {'conflict'}
end
local cost = tonumber(ARGV[8])
local load = redis.call('HMGET', KEYS[4], 'requests:' .. ARGV[6], 'tokens:' .. ARGV[6])
if tonumber(load[1] or 0) + 1 > tonumber(ARGV[12]) then return {'full', 'requests'} end
if tonumber(load[2] or 0) + cost > tonumber(ARGV[13]) then return {'full', 'tokens'} end

local ordinal = redis.call('INCR', KEYS[3])
local now = now_ms()
local entry = redis.call('XADD', KEYS[2], '*', 'id', ARGV[1], 'ordinal', ordinal, 'ticket', ARGV[3],
  'accepted_ms', now, 'deadline_ms', now + tonumber(ARGV[10]), 'crashes', '0', 'committed', '0',
  'priority', ARGV[6], 'cost', cost)
redis.call('HSET', KEYS[1], 'id', ARGV[1], 'body', ARGV[2], 'ticket', ARGV[3], 'digest', ARGV[4], 'seed', ARGV[5],
  'priority', ARGV[6], 'key_id', ARGV[7], 'cost', cost, 'reply', ARGV[9], 'retain_ms', ARGV[11],
  'status', 'waiting', 'attempt', '0', 'crashes', '0', 'ordinal', ordinal, 'entry', entry, 'stream', KEYS[2],
  'accepted_ms', now, 'deadline_ms', now + tonumber(ARGV[10]))
-- A week more than it may run: whatever was off for so long, the former still finds it and ends it properly.
redis.call('PEXPIRE', KEYS[1], tonumber(ARGV[10]) + tonumber(ARGV[11]) + 604800000)
redis.call('HINCRBY', KEYS[4], 'requests:' .. ARGV[6], 1)
redis.call('HINCRBY', KEYS[4], 'tokens:' .. ARGV[6], cost)
redis.call('PUBLISH', ARGV[14], 'accept')
return {'ok', ordinal}
