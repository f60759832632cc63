-- BURY: an entry that cannot be read leaves its stream for the dead letters, raw. If it names a waiting request,
-- that request fails.
-- KEYS 1 stream  2 dead letters  3 state  4 token log  5 logprobs  6 load  7 ended
-- ARGV 1 entry id  2 dead letters kept  3 request id or ''  4 why  5... field, value of the entry
-- Returns 1, or 0 when somebody else had taken the entry
if redis.call('XDEL', KEYS[1], ARGV[1]) ~= 1 then return 0 end
local entry = {'why', ARGV[4], 'stream', KEYS[1]}
for i = 5, #ARGV do entry[#entry + 1] = ARGV[i] end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', unpack(entry))
if ARGV[3] ~= '' and redis.call('HGET', KEYS[3], 'status') == 'waiting' then
  end_request({state = KEYS[3], log = KEYS[4], lps = KEYS[5]}, KEYS[6], KEYS[7], 'failed', 'unreadable',
    failed_event(ARGV[3], 'unreadable', 'the request could not be read: ' .. ARGV[4]))
end
return 1
