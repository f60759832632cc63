-- BURY: an entry that cannot be read leaves its stream for the dead letters, raw. If a request waits by this entry, it
-- fails. If its record is gone, only the load it was counted in is lowered.
-- KEYS 1 stream  2 dead letters  3 state  4 token log  5 logprobs  6 load  7 ended  8 live requests
-- ARGV 1 entry id  2 dead letters kept  3 request id or ''  4 why  5 priority or ''  6 cost  7... field, value
-- Returns 1, or 0 when somebody else had taken the entry
if redis.call('XDEL', KEYS[1], ARGV[1]) ~= 1 then return 0 end
local entry = {'why', ARGV[4], 'stream', KEYS[1]}
for i = 7, #ARGV do entry[#entry + 1] = ARGV[i] end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', unpack(entry))
local f = redis.call('HMGET', KEYS[3], 'status', 'entry')
if ARGV[3] ~= '' and f[1] == 'waiting' and f[2] == ARGV[1] then
  end_request({state = KEYS[3], log = KEYS[4], lps = KEYS[5]}, {KEYS[6], KEYS[7], KEYS[8]}, 'failed', 'unreadable',
    failed_event(ARGV[3], 'unreadable', 'the request could not be read: ' .. ARGV[4]))
elseif not f[1] and ARGV[5] ~= '' then
  redis.call('HINCRBY', KEYS[6], 'requests:' .. ARGV[5], -1)
  redis.call('HINCRBY', KEYS[6], 'tokens:' .. ARGV[5], -tonumber(ARGV[6]))
end
return 1
