package wsdevice

import (
	"bufio"
	"errors"
	"net"
	"net/http"
	"time"

	"github.com/gorilla/websocket"

	"fleetd/internal/connlimit"
	"fleetd/internal/devices"
)

var errBlocked = errors.New("the device was closed for flooding and reconnected too early; try again later")

// emptyLimit is how many bytes without content for the session, such as empty fragments of
// a message, may arrive in sequence. The firmware sends none.
const emptyLimit = 4 << 10

// keepingWriter makes the upgrade read from the connection's own buffer.
type keepingWriter struct {
	http.ResponseWriter
	conn *conn
}

// Hijack implements http.Hijacker.
func (w keepingWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	c, buffered, err := http.NewResponseController(w.ResponseWriter).Hijack()
	if err == nil && buffered.Reader.Buffered() == 0 { // else the upgrade refuses what came before its answer
		buffered = bufio.NewReadWriter(w.conn.in, buffered.Writer)
	}
	return c, buffered, err
}

// input is what a connection reads. The WebSocket reader reads fragments without content internally and does not
// report them, so they are counted here.
type input conn

// Read implements io.Reader.
func (i *input) Read(b []byte) (int, error) {
	c := (*conn)(i)
	n, err := c.ws.NetConn().Read(b)
	if c.emptyBytes += int32(n); err == nil && c.emptyBytes > emptyLimit {
		c.emptyBytes = 0
		err = c.meter.Spend(c.front.opt.Floods, connlimit.CostMessage)
	}
	return n, err
}

// onFlood blocks the device for a while.
func (c *conn) onFlood() {
	session := c.session.Load()
	c.front.opt.Floods.Block(string(session.Device()), time.Now())
	session.Close(devices.CloseFlooding)
}

// ping answers a ping of the device.
func (c *conn) ping(data string) error {
	c.emptyBytes = 0
	if err := c.meter.Spend(c.front.opt.Floods, connlimit.CostControl); err != nil {
		return err
	}
	_ = c.ws.WriteControl(websocket.PongMessage, []byte(data), time.Now().Add(WriteTimeout)) // an error shows in the next read
	return nil
}
