-- Price versions: immutable, each in effect from its moment until the next that fits as well.

-- name: add_price
INSERT INTO prices (id, book, model, tier, service_class, effective_ms, currency, input_micro,
                    cached_input_micro, output_micro, request_micro, cache_write_5m_micro,
                    cache_write_1h_micro, reasoning_micro)
VALUES (:id, :book, :model, :tier, :service_class, :effective_ms, :currency, :input_micro,
        :cached_input_micro, :output_micro, :request_micro, :cache_write_5m_micro,
        :cache_write_1h_micro, :reasoning_micro)
ON CONFLICT DO NOTHING

-- name: price_in_place
-- What keeps another from being added: one of its id, or one for the same that starts with it.
SELECT id, book, model, tier, service_class, effective_ms, currency, input_micro,
       cached_input_micro, output_micro, request_micro, cache_write_5m_micro,
       cache_write_1h_micro, reasoning_micro
  FROM prices
 WHERE id = :id
    OR (book, model, tier, service_class, effective_ms)
       = (:book, :model, :tier, :service_class, :effective_ms)
 ORDER BY id = :id DESC
 LIMIT 1

-- name: other_currency
SELECT currency FROM prices WHERE currency <> :currency AND id <> 'unpriced' LIMIT 1

-- name: price_by_id
SELECT id, book, model, tier, service_class, effective_ms, currency, input_micro,
       cached_input_micro, output_micro, request_micro, cache_write_5m_micro,
       cache_write_1h_micro, reasoning_micro
  FROM prices WHERE id = :id

-- name: current_price
-- The narrowest that has begun: the book before 'list', the tier before any, the class before any.
SELECT id, book, model, tier, service_class, effective_ms, currency, input_micro,
       cached_input_micro, output_micro, request_micro, cache_write_5m_micro,
       cache_write_1h_micro, reasoning_micro
  FROM prices
 WHERE model = :model AND book IN (:book, 'list') AND tier IN (:tier, '')
   AND service_class IN (:service_class, '') AND effective_ms <= :at_ms
 ORDER BY book = :book DESC, tier = :tier DESC, service_class = :service_class DESC,
          effective_ms DESC
 LIMIT 1

-- name: price_list
-- Without 'unpriced', which is no model's price. An empty filter lets everything through.
SELECT id, book, model, tier, service_class, effective_ms, currency, input_micro,
       cached_input_micro, output_micro, request_micro, cache_write_5m_micro,
       cache_write_1h_micro, reasoning_micro
  FROM prices
 WHERE id <> 'unpriced'
   AND (:book = '' OR book = :book) AND (:model = '' OR model = :model)
   AND (:tier = '' OR tier = :tier)
   AND (:service_class = '' OR service_class = :service_class)
 ORDER BY book, model, tier, service_class, effective_ms

-- name: prices_in_view
-- What another took over from more than an hour ago is left out: no request is that old.
SELECT id, book, model, tier, service_class, effective_ms, currency, input_micro,
       cached_input_micro, output_micro, request_micro, cache_write_5m_micro,
       cache_write_1h_micro, reasoning_micro
  FROM (SELECT *, lead(effective_ms) OVER (
                  PARTITION BY book, model, tier, service_class ORDER BY effective_ms) AS ends_ms
          FROM prices
         WHERE model IN (SELECT model FROM routes)) AS versions
 WHERE ends_ms IS NULL OR ends_ms > (extract(epoch FROM now()) - 3600) * 1000

-- name: create_book
INSERT INTO price_books (id, description) VALUES (:id, :description) ON CONFLICT DO NOTHING

-- name: price_books_page
SELECT id, description FROM price_books WHERE id > :after ORDER BY id LIMIT :limit
