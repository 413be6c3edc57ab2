package load

import (
	"context"
	"time"
)

// Offer has send send rate datagrams a second, DatagramBatch of them at a time at most, or as many as go if rate is 0. It
// returns how many were sent.
func Offer(ctx context.Context, rate int, duration time.Duration, send func(n int) error) (sent int, err error) {
	begun := time.Now()
	for ctx.Err() == nil {
		elapsed := time.Since(begun)
		if elapsed > duration {
			return sent, nil
		}
		due := DatagramBatch
		if rate > 0 {
			if due = min(due, int(elapsed.Seconds()*float64(rate))-sent); due <= 0 {
				time.Sleep(200 * time.Microsecond)
				continue
			}
		}
		if err := send(due); err != nil {
			return sent, err
		}
		sent += due
	}
	return sent, context.Cause(ctx)
}
