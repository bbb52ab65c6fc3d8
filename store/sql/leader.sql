-- Who leads in each role, by a lease of the server's clock. The epoch rises with each new term.
--
-- A term's own transactions hold the row FOR KEY SHARE. That lets the holder renew, which
-- changes no key, and keeps others from taking over, which changes the epoch: a column of a
-- unique index, so the update needs the whole row.

-- name: renew
UPDATE leaders SET expires_at = clock_timestamp() + :lease_ms * interval '1 millisecond'
WHERE role = :role AND holder = :holder AND epoch = :epoch AND expires_at > clock_timestamp()
RETURNING epoch

-- Asked first: what follows locks the row even where it finds it taken.
-- name: is_free
SELECT NOT EXISTS (SELECT FROM leaders WHERE role = :role AND expires_at > clock_timestamp())

-- name: take
INSERT INTO leaders AS l (role, holder, epoch, taken_at, expires_at)
VALUES (:role, :holder, 1, clock_timestamp(),
        clock_timestamp() + :lease_ms * interval '1 millisecond')
ON CONFLICT (role) DO UPDATE
SET holder = excluded.holder, epoch = l.epoch + 1, taken_at = clock_timestamp(),
    expires_at = clock_timestamp() + :lease_ms * interval '1 millisecond'
WHERE l.expires_at <= clock_timestamp()
RETURNING epoch

-- name: release
UPDATE leaders SET expires_at = clock_timestamp()
WHERE role = :role AND holder = :holder AND epoch = :epoch AND expires_at > clock_timestamp()

-- name: fence
SELECT true FROM leaders
WHERE role = :role AND holder = :holder AND epoch = :epoch AND expires_at > clock_timestamp()
FOR KEY SHARE

-- A leader that stops in the middle of a transaction keeps others from taking over until the
-- server ends that transaction.
-- name: bound
SELECT set_config('transaction_timeout', :transaction_ms, true)

-- name: leader
SELECT holder, epoch, (extract(epoch FROM taken_at) * 1000)::bigint AS taken_ms,
       expires_at > clock_timestamp() AS leads
FROM leaders WHERE role = :role
