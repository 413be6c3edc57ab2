package vision

import (
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/admission"
	"fleetd/internal/devicetest"
)

// Members that repeatedly upload at 2 bytes a second, on as many connections as there are
// slots, do not prevent others from sending a photo.
func TestSlowUploadsLeaveSlots(t *testing.T) {
	const rate = 2 << 10
	c := newTestServer(t, func(o *Options) { o.MinRate = rate })
	c.vision.slowGrace = 300 * time.Millisecond
	stop := make(chan struct{})
	var slow sync.WaitGroup
	for i := range MaxUploads / MaxPerDevice {
		id := devices.ID(fmt.Sprintf("02:00:00:00:01:%02x", i))
		if _, err := c.service.CheckIn(t.Context(), admission.CheckIn{Device: id, ClientID: "client-1"}); err != nil {
			t.Fatal(err)
		}
		for range MaxPerDevice {
			slow.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
						c.drip(id, stop)
					}
				}
			})
		}
	}
	defer slow.Wait()
	defer close(stop)
	body := cameraBody("q", picture(t, 64))
	devicetest.Eventually(t, "slow uploads are ended", func() bool { return c.vision.Uploads.Get(reasonSlow) >= 20 })
	failed, uploads, ended := 0, 0, c.vision.Uploads.Get(reasonSlow)
	devicetest.Eventually(t, "more of them are ended during 100 uploads", func() bool {
		if r := c.camera(t, robot, strings.NewReader(body)); r.status != 200 {
			failed++
		}
		uploads++
		return uploads >= 100 && c.vision.Uploads.Get(reasonSlow) >= ended+20
	})
	// security: N32
	if failed > 0 {
		t.Errorf("%d of %d uploads of another device failed", failed, uploads)
	}
}

// drip begins an upload and sends two bytes a second until the server ends it.
func (c *testServer) drip(id devices.ID, stop <-chan struct{}) {
	conn, err := net.Dial("tcp", strings.TrimPrefix(c.url, "http://"))
	if err != nil {
		return
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, c.cameraHead(id)+"40\r\n"); err != nil {
		return
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = conn.Read(make([]byte, 1)) // the response, or the end
	}()
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			_, _ = conn.Write([]byte("-"))
		case <-ended:
			return
		case <-stop:
			_ = conn.Close()
			<-ended
			return
		}
	}
}
