-- REJECT: a waiting request fails, because nothing that serves its model could ever run it.
-- KEYS 1 state  2 token log  3 logprobs  4 load  5 ended  6 live requests  7 waiting interactive  8 waiting offline
--      9 waiting returned
-- ARGV 1 id  2 code of the failure  3 message
-- Returns 1, or 0 when it waits no longer
local f = redis.call('HMGET', KEYS[1], 'status', 'stream', 'entry')
if f[1] ~= 'waiting' then return 0 end
redis.call('XDEL', f[2], f[3])
end_request({state = KEYS[1], log = KEYS[2], lps = KEYS[3]}, {KEYS[4], KEYS[5], KEYS[6]}, 'failed', ARGV[2],
  failed_event(ARGV[1], ARGV[2], ARGV[3]))
return 1
