-- BATCH_MOVE: a batch goes from one status to the next, if it is where the caller thinks.
-- KEYS 1 record  2 open batches  3 lease
-- ARGV 1 id  2 the runner that must hold the lease, or '' for anybody  3 statuses to come from, with blanks around each
--      4 status to go to  5 '1' if that one is final  6... field, value
-- Returns the status it has now, '' when there is no such batch, 'lost' when another runner has the lease
local status = redis.call('HGET', KEYS[1], 'status')
if not status then return '' end
if ARGV[2] ~= '' and redis.call('GET', KEYS[3]) ~= ARGV[2] then return 'lost' end
if not string.find(ARGV[3], ' ' .. status .. ' ', 1, true) then return status end
redis.call('HSET', KEYS[1], 'status', ARGV[4], ARGV[4] .. '_at', math.floor(now_ms() / 1000))
for i = 6, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
if ARGV[5] == '1' then redis.call('SREM', KEYS[2], ARGV[1]) end
return ARGV[4]
