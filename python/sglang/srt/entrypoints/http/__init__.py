"""What every HTTP route needs: body, errors, event framing, access, status and control."""
