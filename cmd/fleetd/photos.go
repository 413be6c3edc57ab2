package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"regexp"

	"fleetd/internal/api"
	"fleetd/internal/apiclient"
)

type photosCmd struct {
	List   photosListCmd   `cmd:"" default:"withargs" help:"List photos, newest first, or download them all (the default)."`
	Get    photosGetCmd    `cmd:"" help:"Download one photo."`
	Delete photosDeleteCmd `cmd:"" help:"Delete one photo."`
}

type photosListCmd struct {
	Device    string `device:"name" arg:"" optional:"" help:"Only photos of this device."`
	Output    string `short:"o" help:"Download the photos into this directory as ID.jpg, except those that it already has." placeholder:"DIR"`
	listFlags `set:"per=, one photo per line"`
}

// Run prints the photos, or downloads them.
func (cmd *photosListCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	if cmd.Output != "" {
		if err := os.MkdirAll(cmd.Output, 0o700); err != nil {
			return failed("%w", err)
		}
	}
	query := apiclient.Query{"device": cmd.Device}
	if cmd.Output == "" {
		return printList(ctx, a, a.stdout, c, cmd.listFlags, []string{"ID", "DEVICE", "TAKEN", "KIND", "SIZE", "QUESTION"}, "no photos", func(p api.Photo) []string {
			return []string{p.ID, p.Device, timeCell(p.TakenAt), cmp.Or(p.Kind, "-"), sizeText(p.Bytes), cmp.Or(p.Question, "-")}
		}, query, "photos")
	}
	for p, err := range apiclient.List[apiclient.Answer[api.Photo]](ctx, c, query, "photos") {
		if err == nil {
			err = cmd.download(ctx, a, c, p.Value)
		}
		if err == nil && cmd.JSON {
			err = printJSONLine(a.stdout, p.Raw)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// photoName matches the ids that are safe as file names.
var photoName = regexp.MustCompile(`^[A-Za-z0-9_-][A-Za-z0-9._-]*$`)

// download writes one photo into the directory, unless it is there already.
func (cmd *photosListCmd) download(ctx context.Context, a *app, c *apiclient.Client, p api.Photo) error {
	if !photoName.MatchString(p.ID) {
		return fmt.Errorf("the id %q of a photo cannot be a file name; download it with `fleetd photos get ID -o FILE`", p.ID)
	}
	path := filepath.Join(cmd.Output, p.ID+".jpg")
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return err // nil if the file exists
	}
	size, err := writeFile(path, func(w io.Writer) (int64, error) { return c.Photo(ctx, p.ID, w) })
	if problem, ok := errors.AsType[*apiclient.Problem](err); ok && problem.Code == "not_found" {
		return nil // deleted since it was listed
	}
	if err != nil || cmd.JSON {
		return err
	}
	_, err = fmt.Fprintf(a.stdout, "%s: %s\n", path, sizeText(size))
	return err
}

type photosGetCmd struct {
	ID     string `arg:"" help:"Id of the photo, as the list shows it."`
	Output string `short:"o" required:"" help:"File to write; - is standard output." placeholder:"FILE"`
	clientFlags
}

// Run downloads one photo.
func (cmd *photosGetCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	return a.save(cmd.Output, func(w io.Writer) (int64, error) { return c.Photo(ctx, cmd.ID, w) })
}

type photosDeleteCmd struct {
	ID string `arg:"" help:"Id of the photo, as the list shows it."`
	yesFlag
	clientFlags
}

// Run deletes one photo.
func (cmd *photosDeleteCmd) Run(ctx context.Context, a *app, c *apiclient.Client) error {
	if err := cmd.ask(a, "Delete the photo "+cmd.ID+"?"); err != nil {
		return err
	}
	return a.change(cmd.ID, "deleted", c.Do(ctx, http.MethodDelete, nil, "photos", cmd.ID))
}
