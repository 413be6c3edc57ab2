package provision

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/connlimit"
	"fleetd/internal/devices"
	"fleetd/internal/rollout"
)

// PathFirmware is where devices download images from; what follows is a token.
const PathFirmware = "/xiaozhi/f/"

const (
	// writeTime is how long a device may take nothing of a download; there is no limit of the whole.
	writeTime = 30 * time.Second
	// closeTime is how long a device has to close the connection after the last byte. It must do that first: firmware v2.2 to v2.4
	// uses a freed object if the server does (EspTcp::DoDisconnect of esp-ml307 3.6.4).
	closeTime = 5 * time.Second

	// pieceSize is how much of an image is written at once. The first piece goes out with the headers: firmware up to v2.1.0 wants 288
	// bytes with its first read.
	pieceSize = 32 << 10

	// codeOffer, with a token, is the purpose of the code that follows the token: every node lets such a download pass the limit of its address.
	codeOffer = "offer "
	// offerTime is how long it does. Later downloads are served within the limit.
	offerTime = 2 * time.Minute
	// codeProbe is the purpose of the code in the address of a probe.
	codeProbe = "probe"
	// probeTime is how long that address is valid.
	probeTime = 2 * time.Minute
	// probePause is in the middle of the probe, so that a proxy shows whether it passes on a download as it comes.
	probePause = 3 * time.Second
)

// probe is what doctor downloads in place of an image: bytes that do not compress, in an order that shows what was cut.
var probe = func() (body []byte) {
	for sum := sha256.Sum256(nil); len(body) < 32<<10; sum = sha256.Sum256(sum[:]) {
		body = append(body, sum[:]...)
	}
	return body
}()

// newProbe returns a probe that can be downloaded for some time, from any node.
func (s *Server) newProbe() devices.Probe {
	sum := sha256.Sum256(probe)
	return devices.Probe{URL: s.opt.PublicURL + PathFirmware + s.opt.Mint.Code(codeProbe, clock.Now().Add(probeTime)), Size: int64(len(probe)), SHA256: hex.EncodeToString(sum[:])}
}

// download serves an image, or the probe, to who has its address. Nothing else is served: to old firmware, any body with status 200 is an
// image.
func (s *Server) download(w http.ResponseWriter, r *http.Request) {
	token := r.PathValue("token")
	if r.Method != http.MethodGet { // the pattern takes HEAD, too, which is no fetch
		http.Error(w, "use GET", http.StatusMethodNotAllowed)
		return
	}
	if s.opt.Mint.VerifyCode(codeProbe, token, clock.Now()) == nil {
		s.serveProbe(w, r)
		return
	}
	address := connlimit.ClientAddress(r, s.opt.TrustedProxies)
	token, code, _ := strings.Cut(token, ".")
	if s.opt.Mint.VerifyCode(codeOffer+token, code, clock.Now()) != nil && !s.limits.Allow(connlimit.AddressKey(address), s.opt.RatePerMinute, s.opt.Burst) {
		s.refuse(w, "rate_limited", http.StatusTooManyRequests, errors.New("too many requests from this address; try again"))
		return
	}
	d, err := s.opt.Rollouts.Open(r.Context(), token, s.known(address))
	switch {
	case errors.Is(err, rollout.ErrBusy):
		http.Error(w, "this image is being downloaded already", http.StatusTooManyRequests)
		return
	case errors.Is(err, rollout.ErrNoDownload), errors.Is(err, devices.ErrNotFound):
		http.Error(w, "not found", http.StatusNotFound)
		return
	case err != nil:
		http.Error(w, "the image is not at hand", http.StatusServiceUnavailable)
		return
	}
	err = serveDownload(w, r, d.Size, func(write func([]byte) error) error { return copyImage(d, write) }, func() { d.Note(d.Size) })
	d.Close(err, s.opt.Draining())
	abort(err)
}

// abort breaks the connection after an error, so that nobody takes the beginning of an answer for the whole.
func abort(err error) {
	if err != nil {
		panic(http.ErrAbortHandler)
	}
}

// copyImage writes an image piece by piece.
func copyImage(d *rollout.Download, write func([]byte) error) error {
	buffer := make([]byte, pieceSize)
	for sent := int64(0); sent < d.Size; {
		n, err := io.ReadFull(d.File, buffer[:min(int64(len(buffer)), d.Size-sent)])
		if err != nil {
			return err
		}
		if err := write(buffer[:n]); err != nil {
			return err
		}
		sent += int64(n)
		d.Note(sent)
	}
	return nil
}

func (s *Server) serveProbe(w http.ResponseWriter, r *http.Request) {
	half := len(probe) / 2
	abort(serveDownload(w, r, int64(len(probe)), func(write func([]byte) error) error {
		if err := write(probe[:half]); err != nil {
			return err
		}
		if !clock.Sleep(r.Context(), probePause) {
			return r.Context().Err()
		}
		return write(probe[half:])
	}, func() {}))
}

// serveDownload answers as the firmware's HTTP client wants it (ota.cc:267-387): status 200, Content-Length, no other coding, headers
// of a few hundred bytes, and the first bytes of the body with them. It calls note while the device takes bytes after the last one was
// written. The error is that of body, or says that the device has not read everything.
func serveDownload(w http.ResponseWriter, r *http.Request, size int64, body func(write func([]byte) error) error, note func()) error {
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Time{}) // that of the request would end the context in the middle of a long download
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
	err := body(func(piece []byte) error {
		if err := control.SetWriteDeadline(time.Now().Add(writeTime)); err != nil {
			return err
		}
		if _, err := w.Write(piece); err != nil {
			return err
		}
		return control.Flush()
	})
	if err != nil {
		return err
	}
	return awaitRead(r.Context(), func() int { return connlimit.Unread(r.Context()) }, note)
}

// awaitRead waits until the device has closed the connection, or has taken all bytes that were written and has not closed it for closeTime.
// unread returns how many bytes its system has not acknowledged.
func awaitRead(ctx context.Context, unread func() int, note func()) error {
	ticker := time.NewTicker(closeTime)
	defer ticker.Stop()
	for left, taken := unread(), time.Now(); ; {
		select {
		case <-ctx.Done():
			if !connlimit.EndedWell(ctx) {
				return errors.New("the device broke the connection before it had read everything")
			}
			return nil
		case <-ticker.C:
		}
		switch now := unread(); {
		case now == 0 && left == 0: // what it did with the image is known at its next check
			return nil
		case now < left:
			left, taken = now, time.Now()
			note()
		case time.Since(taken) >= writeTime:
			return errors.New("the device did not take the end of the image")
		}
	}
}
