-- RETIRE: a daemon's record goes away. A worker's rows must be handed back first: while it has any, it is only marked
-- dead, so that nothing new is sent to it and its own heartbeat is refused, and the rows are returned.
-- KEYS 1 record  2 its job stream  3 its rows  4 daemons  5 ids that wait for it alone, an API process
-- ARGV 1 id
-- Returns {} when the record is gone, else {request id, attempt, ...}
local rows = redis.call('HGETALL', KEYS[3])
if #rows > 0 then
  if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], 'accepting', '0', 'dead', '1') end
  return rows
end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], KEYS[5])
redis.call('SREM', KEYS[4], ARGV[1])
return {}
