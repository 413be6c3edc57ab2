//go:build !linux

package connlimit

import (
	"net"
	"time"
)

// endUnread does nothing: other operating systems do not have TCP_USER_TIMEOUT.
func endUnread(net.Conn, time.Duration) {}
