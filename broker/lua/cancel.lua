-- CANCEL: somebody wants a request to end. The first cause stays. A waiting request ends here; a running one is
-- ended by its worker, which learns of it from its next COMMIT (the control channel only wakes it).
-- KEYS 1 state  2 token log  3 logprobs  4 load  5 ended  6 waiting interactive  7 waiting offline  8 waiting returned
--      9 live requests by deadline
-- ARGV 1 id  2 cause  3 control channel  4 '1': only if nobody wants it any more, see KEEP
-- Returns 'unknown' | 'wanted' | 'ended' (it had ended before) | 'cancelled' (it ended here) | 'pending' (its worker will end it)
local f = redis.call('HMGET', KEYS[1], 'status', 'cancel', 'stream', 'entry', 'wanted_until_ms')
if f[1] ~= 'waiting' and f[1] ~= 'running' then
  redis.call('ZREM', KEYS[9], ARGV[1]) -- an older script, which knows no such list, may have ended it
  return f[1] and 'ended' or 'unknown'
end
if ARGV[4] == '1' and tonumber(f[5] or 0) > now_ms() then return 'wanted' end
local cause = f[2] or ARGV[2]
redis.call('HSET', KEYS[1], 'cancel', cause)
if f[1] == 'running' then
  if cause == 'deadline' then redis.call('ZADD', KEYS[9], 'XX', now_ms() + 5000, ARGV[1]) end -- look again then
  redis.call('PUBLISH', ARGV[3], 'cancel')
  return 'pending'
end
redis.call('XDEL', f[3], f[4])
local status, reason = end_of(cause)
local length = redis.call('STRLEN', KEYS[2]) / 4
end_request({state = KEYS[1], log = KEYS[2], lps = KEYS[3]}, {KEYS[4], KEYS[5], KEYS[9]}, status, cause,
  finished_event(ARGV[1], reason, length, cause))
return 'cancelled'
