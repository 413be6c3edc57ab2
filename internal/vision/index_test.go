package vision

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/racetest"
)

// keep runs Keep until the test ends.
func (c *testServer) keep(t *testing.T) {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.vision.Keep(ctx)
	}()
	t.Cleanup(func() {
		stop()
		<-done
	})
}

// storeUnindexed stores n photos of a device as a node does that has no database: as objects without
// index entries, and returns their ids, oldest first. They have no chunks.
func (c *testServer) storeUnindexed(t *testing.T, device devices.ID, n int) (ids []string) {
	t.Helper()
	c.camera(t, robot, strings.NewReader(cameraBody("first", picture(t, 16)))).must(t) // creates the bucket
	begun := time.Now().Add(-30 * time.Minute)
	for i := range n {
		id := newPhotoID(begun.Add(time.Duration(i) * time.Millisecond))
		ids = append(ids, id)
		data, err := json.Marshal(jetstream.ObjectInfo{Bucket: bucketName, NUID: id, Size: 1000, ObjectMeta: jetstream.ObjectMeta{Name: id,
			Metadata: map[string]string{metaDevice: string(device), metaKind: KindCamera, metaTaken: begun.UTC().Format(time.RFC3339Nano)}}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.js.PublishAsync(c.vision.bucket.metaSubject(id), data, jetstream.WithStallWait(time.Minute)); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-c.js.PublishAsyncComplete():
	case <-time.After(time.Minute):
		t.Fatal("the photos are not stored")
	}
	return ids
}

var many = racetest.Size(30_000, 5_000)

// The time to list photos depends on the page, not on the number of stored photos, and
// photos that are missing in it are added to the index.
func TestListOfManyPhotos(t *testing.T) {
	c := newTestServer(t)
	ids := c.storeUnindexed(t, other, many)
	c.keep(t)
	for _, n := range []int{0, many / 4, many / 2, many * 3 / 4, many - 1} {
		before := ""
		if n < many-1 {
			before = ids[n+1]
		}
		devicetest.Eventually(t, fmt.Sprintf("photo %d is listed", n), func() bool {
			page, _, err := c.vision.List(t.Context(), other, before, 1)
			if err != nil {
				t.Fatal(err)
			}
			return len(page) == 1 && page[0].ID == ids[n]
		})
	}
	if len(c.ids(t, t.Context(), robot)) != 1 || len(c.ids(t, t.Context(), other)) != 1000 {
		t.Error("the index is not filled")
	}
	begun := time.Now()
	for range 20 {
		if page, _, err := c.vision.List(t.Context(), other, "", 100); err != nil || len(page) != 100 {
			t.Fatalf("%d photos, %v", len(page), err)
		}
		if page, more, err := c.vision.List(t.Context(), "nobody", "", 100); err != nil || len(page) != 0 || more {
			t.Fatalf("%d photos of nobody, %v", len(page), err)
		}
	}
	if took := time.Since(begun); took > 2*time.Second {
		t.Errorf("40 lists of %d photos took %v", many, took)
	}
}

// A full store accepts photos even if it contains very many small ones.
func TestUploadIntoAFullStoreOfMany(t *testing.T) {
	const limit = 12 << 20
	c := newTestServer(t, func(o *Options) { o.Limit = limit })
	c.storeUnindexed(t, other, racetest.Size(26_000, 5_000))
	jpeg := picture(t, 512)
	for i := range 12 {
		begun := time.Now()
		c.camera(t, robot, strings.NewReader(cameraBody(fmt.Sprint(i), jpeg))).must(t)
		if took := time.Since(begun); took > 4*time.Second {
			t.Fatalf("upload %d took %v", i, took)
		}
	}
	if got := len(c.ids(t, t.Context(), robot)); got < 10 {
		t.Errorf("%d photos are listed", got)
	}
}

// Photos stored while the database was unreachable are added to the index later.
func TestPhotosWithoutTheDatabase(t *testing.T) {
	index := &awayIndex{Index: newIndex(t), away: true}
	c := newTestServer(t, func(o *Options) { o.Index = index })
	photo := c.camera(t, robot, strings.NewReader(cameraBody("?", picture(t, 64)))).must(t)
	if _, content := c.content(t, photo); len(content) == 0 {
		t.Error("the photo is not stored")
	}
	index.away = false
	c.keep(t)
	devicetest.Eventually(t, "the photo is listed", func() bool { return len(c.ids(t, t.Context(), robot)) == 1 })
}

// awayIndex is an index whose database cannot be written for some time.
type awayIndex struct {
	Index
	away bool
}

func (x *awayIndex) Add(ctx context.Context, photos ...devices.Photo) error {
	if x.away {
		return devices.ErrDatabase
	}
	return x.Index.Add(ctx, photos...)
}
